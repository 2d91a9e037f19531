// Launches a compiled kernel from the tensors of a call: one call of Python for what would be a dozen.
//
// A Kernel knows what it was compiled for: the types of its parameters, the dtype of each tensor, the tile of each
// descriptor. Its `launch` returns False, and launches nothing, where the arguments are others, a tensor does not begin
// at a multiple of 16 bytes, or another device is current: then the caller goes through Triton. Only Triton's own
// launcher takes clusters, scratch memory and hooks.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>

#define MOST 256     // parameters of a kernel
#define MOST_MAPS 8  // of them tensor maps
#define MOST_DIMS 5  // of a tensor map

static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult (*error_string)(CUresult, const char **), (*driver_version)(int *);
static CUresult (*get_context)(CUcontext *), (*set_context)(CUcontext), (*primary_context)(CUcontext *, CUdevice);
static CUresult (*context_device)(CUdevice *);
static int version;
static PyObject *DATA_PTR, *DTYPE, *BASE, *SHAPE, *STRIDES, *BLOCK_SHAPE;

typedef struct {  // of a descriptor, as compat.py packs it
    int dims;     // 0: there is none
    int swizzle, element_size, element_type;
    int tile[MOST_DIMS];   // as the descriptor has it
    int block[MOST_DIMS];  // that one load takes, innermost first, as CUDA has it
} Tile;

typedef struct {
    PyObject_HEAD
    CUfunction function;
    int device, num_tiles, num_tensors, num_numbers;
    unsigned threads, shared;
    PyObject *dtypes;  // a tuple: of descriptors, then of tensors; None where there is none
    Tile tiles[MOST_MAPS];
    char is_aligned[MOST];  // of each tensor, whether it must begin at a multiple of 16 bytes
    char numbers[MOST];     // i: int32, l: int64, f: float
} Kernel;

typedef struct {
    int tensor, count;   // tensors that have been read, and parameters
    uint64_t addresses;  // of those that must be aligned, all bits
    void *params[MOST];
    uint64_t words[MOST];
} Arguments;

static void add(Arguments *arguments, uint64_t word) {
    arguments->words[arguments->count] = word;
    arguments->params[arguments->count] = &arguments->words[arguments->count];
    arguments->count++;
}

static bool address_of(PyObject *tensor, uint64_t *address) {
    PyObject *number = PyObject_CallMethodNoArgs(tensor, DATA_PTR);
    if (number == NULL) return false;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

static bool has_dtype(PyObject *tensor, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(tensor, DTYPE);
    Py_XDECREF(found);  // PyTorch keeps it
    return found == wanted;
}

// Reads so many integers, such as a shape, outermost first.
static bool integers_of(PyObject *owner, PyObject *name, int count, int64_t *integers) {
    PyObject *found = PyObject_GetAttr(owner, name);
    PyObject *sequence = found == NULL ? NULL : PySequence_Fast(found, "no sequence");
    bool fits = sequence != NULL && PySequence_Fast_GET_SIZE(sequence) == count;
    for (int i = 0; fits && i < count; i++) integers[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(sequence, i));
    Py_XDECREF(sequence);
    Py_XDECREF(found);
    return fits && !PyErr_Occurred();
}

// Encodes the descriptor of a tile; its parameters are the map, the shape in int32 and the strides in int64.
static bool add_descriptor(const Tile *tile, PyObject *dtype, PyObject *descriptor, CUtensorMap *map,
                           Arguments *arguments) {
    if (tile->dims == 0) return descriptor == Py_None;
    int dims = tile->dims;
    int64_t shape[MOST_DIMS], strides[MOST_DIMS], sides[MOST_DIMS];
    uint64_t address = 0, last_byte = 0;
    PyObject *base = PyObject_GetAttr(descriptor, BASE);
    bool fits = base != NULL && has_dtype(base, dtype) && address_of(base, &address) && address % 16 == 0;
    Py_XDECREF(base);
    fits = fits && integers_of(descriptor, SHAPE, dims, shape) && integers_of(descriptor, STRIDES, dims, strides);
    if (!fits || strides[dims - 1] != 1 || !integers_of(descriptor, BLOCK_SHAPE, dims, sides)) return false;
    cuuint64_t sizes[MOST_DIMS], bytes[MOST_DIMS];
    for (int i = 0; i < dims; i++) {  // innermost first
        int64_t size = shape[dims - 1 - i], stride = strides[dims - 1 - i] * tile->element_size;
        if (sides[i] != tile->tile[i] || size < 1 || size > INT32_MAX) return false;
        sizes[i] = size;
        if (i > 0) bytes[i - 1] = stride;
        last_byte += (size - 1) * stride;
    }
    static const cuuint32_t ones[MOST_DIMS] = {1, 1, 1, 1, 1};
    if (encode_tiled(map, tile->element_type, dims, (void *)address, sizes, bytes, (const cuuint32_t *)tile->block, ones,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, tile->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS) return false;
    // Drivers up to this one encode small tensors wrongly: Triton and CUTLASS clear the same bit.
    if (version <= 13010 && last_byte + 1 < 128 * 1024) ((uint64_t *)map)[1] &= ~(1llu << 21);
    arguments->params[arguments->count++] = map;
    for (int i = 0; i < dims; i++) add(arguments, shape[i]);
    for (int i = 0; i < dims; i++) add(arguments, strides[i]);
    return true;
}

static bool add_tensors(const Kernel *self, PyObject *tensors, Arguments *arguments) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        PyObject *x = PyTuple_GET_ITEM(tensors, i);
        if (PyTuple_CheckExact(x)) {
            if (!add_tensors(self, x, arguments)) return false;
            continue;
        }
        int at = arguments->tensor++;
        if (at >= self->num_tensors) return false;
        PyObject *dtype = PyTuple_GET_ITEM(self->dtypes, self->num_tiles + at);
        if (x == Py_None || dtype == Py_None) {
            if (x != dtype) return false;
            continue;
        }
        uint64_t address;
        if (!has_dtype(x, dtype) || !address_of(x, &address)) return false;
        if (self->is_aligned[at]) arguments->addresses |= address;
        add(arguments, address);
    }
    return true;
}

static bool add_numbers(const Kernel *self, PyObject *numbers, Arguments *arguments) {
    if (PyTuple_GET_SIZE(numbers) != self->num_numbers) return false;
    for (int i = 0; i < self->num_numbers; i++) {
        PyObject *x = PyTuple_GET_ITEM(numbers, i);
        uint64_t word = 0;
        if (self->numbers[i] == 'f') {
            if (!PyFloat_Check(x)) return false;
            float value = (float)PyFloat_AS_DOUBLE(x);
            memcpy(&word, &value, sizeof value);
        } else {
            if (!PyLong_CheckExact(x)) return false;
            int64_t value = PyLong_AsLongLong(x);
            if (PyErr_Occurred()) return false;
            if (self->numbers[i] == 'i' && (value > INT32_MAX || value < INT32_MIN)) return false;
            word = (uint64_t)value;
        }
        add(arguments, word);
    }
    return true;
}

// Returns whether a device is the current one of a thread, which gets its context if it has none.
static bool ensure_context(int device) {
    CUcontext context = NULL;
    CUdevice current = -1;
    if (get_context(&context) != CUDA_SUCCESS) return false;
    // To PyTorch device 0 is the current one of such a thread.
    if (context == NULL && (device != 0 || primary_context(&context, 0) || set_context(context))) return false;
    return context_device(&current) == CUDA_SUCCESS && current == device;
}

// launch(grid, stream, tensors, numbers, descriptors): whether it was launched.
static PyObject *launch(Kernel *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 5 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != 3 || !PyTuple_CheckExact(args[2]) ||
        !PyTuple_CheckExact(args[3]) || !PyTuple_CheckExact(args[4])) {
        PyErr_SetString(PyExc_TypeError, "launch takes a grid, a stream, and tuples of tensors, numbers, descriptors");
        return NULL;
    }
    _Alignas(128) CUtensorMap maps[MOST_MAPS];
    Arguments arguments;
    arguments.tensor = arguments.count = 0;
    arguments.addresses = 0;
    bool fits = ensure_context(self->device) && PyTuple_GET_SIZE(args[4]) == self->num_tiles;
    for (int i = 0; fits && i < self->num_tiles; i++) {
        PyObject *dtype = PyTuple_GET_ITEM(self->dtypes, i);
        fits = add_descriptor(&self->tiles[i], dtype, PyTuple_GET_ITEM(args[4], i), &maps[i], &arguments);
    }
    fits = fits && add_tensors(self, args[2], &arguments) && arguments.tensor == self->num_tensors;
    fits = fits && !(arguments.addresses % 16) && add_numbers(self, args[3], &arguments);
    unsigned long grid[3] = {0};
    for (int i = 0; fits && i < 3; i++) {
        grid[i] = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(args[0], i));
        fits = !PyErr_Occurred() && grid[i] <= (i == 0 ? INT32_MAX : UINT16_MAX);
    }
    fits = fits && grid[0] * grid[1] <= INT32_MAX && grid[0] * grid[1] * grid[2] <= INT32_MAX;
    if (!fits) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (!(grid[0] && grid[1] && grid[2])) Py_RETURN_TRUE;
    add(&arguments, 0);  // scratch memory of the kernel
    add(&arguments, 0);  // and of a profiler
    CUlaunchConfig config = {.gridDimX = grid[0], .gridDimY = grid[1], .gridDimZ = grid[2], .blockDimX = self->threads,
                             .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = self->shared};
    config.hStream = (CUstream)PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    CUresult result;
    Py_BEGIN_ALLOW_THREADS;
    result = launch_kernel(&config, self->function, arguments.params, NULL);
    Py_END_ALLOW_THREADS;
    if (result != CUDA_SUCCESS) {
        const char *text = NULL;
        error_string(result, &text);
        return PyErr_Format(PyExc_RuntimeError, "CUDA could not launch a kernel: %s", text ? text : "unknown error");
    }
    Py_RETURN_TRUE;
}

// Kernel(function, device, threads, shared, dtypes, tiles, is_aligned, numbers)
static int init(Kernel *self, PyObject *args, PyObject *kwargs) {
    PyObject *dtypes;
    unsigned long long function;
    const char *tiles, *is_aligned, *numbers;
    Py_ssize_t size, num_tensors, num_numbers;
    if (!PyArg_ParseTuple(args, "KiIIO!y#y#y#", &function, &self->device, &self->threads, &self->shared, &PyTuple_Type,
                          &dtypes, &tiles, &size, &is_aligned, &num_tensors, &numbers, &num_numbers)) return -1;
    Py_ssize_t num_tiles = size / sizeof(Tile), parameters = num_tiles * (1 + 2 * MOST_DIMS) + num_tensors + num_numbers;
    if (num_tiles > MOST_MAPS || parameters > MOST - 2 || PyTuple_GET_SIZE(dtypes) != num_tiles + num_tensors) {
        PyErr_SetString(PyExc_ValueError, "a kernel has more parameters than the launcher takes");
        return -1;
    }
    Py_XSETREF(self->dtypes, Py_NewRef(dtypes));
    self->function = (CUfunction)function;
    self->num_tiles = num_tiles, self->num_tensors = num_tensors, self->num_numbers = num_numbers;
    memcpy(self->tiles, tiles, self->num_tiles * sizeof(Tile));
    memcpy(self->is_aligned, is_aligned, num_tensors);
    memcpy(self->numbers, numbers, num_numbers);
    return 0;
}

static void dealloc(Kernel *self) {
    Py_XDECREF(self->dtypes);
    Py_TYPE(self)->tp_free(self);
}

static PyMethodDef METHODS[] = {{"launch", (PyCFunction)launch, METH_FASTCALL, "Returns whether it was launched."}, {0}};
static PyTypeObject TYPE = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "jfi_launcher.Kernel",
    .tp_basicsize = sizeof(Kernel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)init,
    .tp_dealloc = (destructor)dealloc,
    .tp_methods = METHODS,
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "jfi_launcher", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_jfi_launcher(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_LAZY);
    const char *names[] = {"cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuGetErrorString", "cuDriverGetVersion",
                           "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain", "cuCtxGetDevice"};
    void *functions[] = {&launch_kernel, &encode_tiled, &error_string, &driver_version,
                         &get_context, &set_context, &primary_context, &context_device};
    for (int i = 0; i < 8; i++) {
        *(void **)functions[i] = cuda == NULL ? NULL : dlsym(cuda, names[i]);
        if (*(void **)functions[i] == NULL) return PyErr_Format(PyExc_ImportError, "libcuda.so.1 has no %s", names[i]);
    }
    if (driver_version(&version) != CUDA_SUCCESS) version = 0;
    PyObject **interned[] = {&DATA_PTR, &DTYPE, &BASE, &SHAPE, &STRIDES, &BLOCK_SHAPE};
    const char *texts[] = {"data_ptr", "dtype", "base", "shape", "strides", "block_shape"};
    for (int i = 0; i < 6; i++) *interned[i] = PyUnicode_InternFromString(texts[i]);
    if (PyType_Ready(&TYPE) < 0) return NULL;
    PyObject *module = PyModule_Create(&MODULE);
    if (module != NULL && PyModule_AddObjectRef(module, "Kernel", (PyObject *)&TYPE) < 0) Py_CLEAR(module);
    return module;
}
