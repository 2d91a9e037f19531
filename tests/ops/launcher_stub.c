// In the place of CUDA's driver: records the arguments of a launch, and a descriptor as what it was made of.
#include <cuda.h>
#include <string.h>

int version = 13020, retained;

static CUlaunchConfig config;
static unsigned char record[256][128];
static int sizes[256];
static __thread CUcontext context;  // the address of its device

void expect(const int *bytes, int count) {
    memset(sizes, 0, sizeof sizes);
    memcpy(sizes, bytes, count * sizeof(int));
}

const unsigned char *recorded(int i) { return record[i]; }

unsigned configured(int i) {
    unsigned values[] = {config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.sharedMemBytes};
    return values[i];
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *given, CUfunction function, void **params, void **extra) {
    config = *given;
    for (int i = 0; i < 256 && sizes[i]; i++) memcpy(record[i], params[i], sizes[i]);
    return function == (CUfunction)13 || context == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
    cuuint64_t made[16] = {(cuuint64_t)address, 1 << 21, type, rank, swizzle};
    for (cuuint32_t i = 0; i < rank; i++) {
        made[5 + 3 * i] = dims[i];
        made[6 + 3 * i] = box[i];
        if (i + 1 < rank) made[7 + 3 * i] = strides[i];
    }
    memcpy(map, made, sizeof made);
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult result, const char **text) {
    *text = "invalid argument";
    return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *number) {
    *number = version;
    return CUDA_SUCCESS;
}

static int devices[] = {0, 1};

CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) {
    retained++;
    *made = (CUcontext)&devices[device];
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext given) {
    context = given;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *current) {
    *current = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
    *device = *(int *)context;
    return CUDA_SUCCESS;
}
