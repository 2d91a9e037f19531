// Launches a compiled kernel from the tensors of a call: one call of Python for what would be a dozen.
//
// A Kernel knows what it was compiled for: the types of its parameters, and of each tensor the dtype. Its `launch`
// returns False, and launches nothing, where the arguments are others, or a tensor does not begin at a multiple of 16
// bytes: then the caller goes through Triton. Only Triton's own launcher takes clusters, scratch memory and hooks.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>

#define MOST 64

static CUresult (*launch_kernel)(const CUlaunchConfig *, CUfunction, void **, void **);
static CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult (*error_string)(CUresult, const char **);
static PyObject *DATA_PTR, *DTYPE, *BASE, *SHAPE, *STRIDES, *BLOCK_SHAPE;

typedef struct {
    PyObject *dtype;  // of a tensor; None where there is none
    bool is_aligned;  // whether it must begin at a multiple of 16 bytes
} Leaf;

typedef struct {
    PyObject *dtype, *block_shape;  // the list itself, one for the same tile
    int swizzle, element_size, element_type;
    cuuint32_t block[2];  // innermost first, as CUDA has it
} Tile;

typedef struct {
    PyObject_HEAD
    CUfunction function;
    unsigned threads, shared;
    int num_tiles, num_leaves, num_numbers;
    Tile tiles[8];
    Leaf leaves[MOST];
    char numbers[16];  // i: int32, l: int64, f: float
} Kernel;

typedef struct {
    int leaf, count;  // of the leaves that have been read, and of the parameters
    uint64_t addresses;
    void *params[MOST];
    uint64_t words[MOST];
} Arguments;

static bool add(Arguments *arguments, uint64_t word) {
    if (arguments->count >= MOST - 2) return false;
    arguments->words[arguments->count] = word;
    arguments->params[arguments->count] = &arguments->words[arguments->count];
    arguments->count++;
    return true;
}

static bool address_of(PyObject *tensor, uint64_t *address) {
    PyObject *number = PyObject_CallMethodNoArgs(tensor, DATA_PTR);
    if (number == NULL) return false;
    *address = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

static bool has(PyObject *owner, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(owner, name);
    Py_XDECREF(found);  // its owner keeps it
    return found == wanted;
}

// Reads a pair of integers, outermost first.
static bool pair_of(PyObject *owner, PyObject *name, uint64_t *pair) {
    PyObject *tuple = PyObject_GetAttr(owner, name);
    bool fits = tuple != NULL && PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == 2;
    for (int i = 0; fits && i < 2; i++) pair[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(tuple, i));
    Py_XDECREF(tuple);
    return fits && !PyErr_Occurred();
}

// Encodes the descriptor of a tile; its parameters are the map, two int32 of the shape, two int64 of the strides.
static bool add_descriptor(const Tile *tile, PyObject *descriptor, CUtensorMap *map, Arguments *arguments) {
    if (tile->dtype == Py_None) return descriptor == Py_None;
    uint64_t shape[2], strides[2], address;
    PyObject *base = PyObject_GetAttr(descriptor, BASE);
    bool fits = base != NULL && has(base, DTYPE, tile->dtype) && has(descriptor, BLOCK_SHAPE, tile->block_shape);
    fits = fits && pair_of(descriptor, SHAPE, shape) && pair_of(descriptor, STRIDES, strides);
    fits = fits && address_of(base, &address);
    Py_XDECREF(base);
    if (!fits || address % 16 || shape[0] >= INT32_MAX || arguments->count >= MOST - 8) return false;
    cuuint64_t sizes[2] = {shape[1], shape[0]}, row = strides[0] * tile->element_size, bytes[2] = {row, row * shape[0]};
    cuuint32_t ones[2] = {1, 1};
    CUresult result = encode_tiled(map, tile->element_type, 2, (void *)address, sizes, bytes, tile->block, ones,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, tile->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) return false;
    arguments->params[arguments->count++] = map;
    return add(arguments, shape[0]) && add(arguments, shape[1]) && add(arguments, strides[0]) &&
           add(arguments, strides[1]);
}

static bool add_tensors(Kernel *self, PyObject *tensors, Arguments *arguments) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); i++) {
        PyObject *x = PyTuple_GET_ITEM(tensors, i);
        if (PyTuple_CheckExact(x)) {
            if (!add_tensors(self, x, arguments)) return false;
            continue;
        }
        if (arguments->leaf >= self->num_leaves) return false;
        const Leaf *leaf = &self->leaves[arguments->leaf++];
        if (x == Py_None || leaf->dtype == Py_None) {
            if (x != leaf->dtype) return false;
            continue;
        }
        uint64_t address;
        if (!has(x, DTYPE, leaf->dtype) || !address_of(x, &address) || !add(arguments, address)) return false;
        if (leaf->is_aligned) arguments->addresses |= address;
    }
    return true;
}

static bool add_numbers(const Kernel *self, PyObject *numbers, Arguments *arguments) {
    if (PyTuple_GET_SIZE(numbers) != self->num_numbers) return false;
    for (int i = 0; i < self->num_numbers; i++) {
        PyObject *x = PyTuple_GET_ITEM(numbers, i);
        uint64_t word = 0;
        if (self->numbers[i] == 'f') {
            float value = (float)PyFloat_AsDouble(x);
            memcpy(&word, &value, sizeof value);
        } else {
            if (!PyLong_CheckExact(x)) return false;
            int64_t value = PyLong_AsLongLong(x);
            if (self->numbers[i] == 'i' && (value > INT32_MAX || value < INT32_MIN)) return false;
            word = (uint64_t)value;
        }
        if (PyErr_Occurred() || !add(arguments, word)) return false;
    }
    return true;
}

// launch(grid, stream, tensors, numbers, descriptors): whether it was launched.
static PyObject *launch(Kernel *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 5 || !PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != 3 || !PyTuple_CheckExact(args[2]) ||
        !PyTuple_CheckExact(args[3]) || !PyTuple_CheckExact(args[4])) {
        PyErr_SetString(PyExc_TypeError, "launch takes a grid, a stream, and tuples of tensors, numbers, descriptors");
        return NULL;
    }
    _Alignas(128) CUtensorMap maps[8];
    Arguments arguments = {0};
    bool fits = PyTuple_GET_SIZE(args[4]) == self->num_tiles;
    for (int i = 0; fits && i < self->num_tiles; i++) {
        fits = add_descriptor(&self->tiles[i], PyTuple_GET_ITEM(args[4], i), &maps[i], &arguments);
    }
    fits = fits && add_tensors(self, args[2], &arguments) && arguments.leaf == self->num_leaves;
    fits = fits && !(arguments.addresses % 16) && add_numbers(self, args[3], &arguments);
    if (!fits) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    uint64_t none = 0;
    arguments.params[arguments.count++] = &none;  // scratch memory of the kernel
    arguments.params[arguments.count++] = &none;  // and of a profiler
    CUlaunchConfig config = {.blockDimX = self->threads, .blockDimY = 1, .blockDimZ = 1, .sharedMemBytes = self->shared};
    config.gridDimX = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(args[0], 0));
    config.gridDimY = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(args[0], 1));
    config.gridDimZ = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(args[0], 2));
    config.hStream = (CUstream)PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred()) return NULL;
    if (!(config.gridDimX && config.gridDimY && config.gridDimZ)) Py_RETURN_TRUE;
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

// Kernel(function, threads, shared, tiles, leaves, numbers)
static int init(Kernel *self, PyObject *args, PyObject *kwargs) {
    unsigned long long function;
    PyObject *tiles, *leaves;
    const char *numbers;
    if (!PyArg_ParseTuple(args, "KIIO!O!s", &function, &self->threads, &self->shared, &PyTuple_Type, &tiles,
                          &PyTuple_Type, &leaves, &numbers)) return -1;
    self->function = (CUfunction)function;
    if (PyTuple_GET_SIZE(tiles) > 8 || PyTuple_GET_SIZE(leaves) > MOST || strlen(numbers) > sizeof self->numbers) {
        PyErr_SetString(PyExc_ValueError, "a kernel has more parameters than the launcher takes");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tiles); i++, self->num_tiles++) {
        Tile *tile = &self->tiles[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tiles, i), "OOiii(II)", &tile->dtype, &tile->block_shape, &tile->swizzle,
                              &tile->element_size, &tile->element_type, &tile->block[1], &tile->block[0])) return -1;
        Py_INCREF(tile->dtype);
        Py_INCREF(tile->block_shape);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(leaves); i++, self->num_leaves++) {
        int is_aligned;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(leaves, i), "Op", &self->leaves[i].dtype, &is_aligned)) return -1;
        Py_INCREF(self->leaves[i].dtype);
        self->leaves[i].is_aligned = is_aligned;
    }
    self->num_numbers = (int)strlen(numbers);
    memcpy(self->numbers, numbers, self->num_numbers);
    return 0;
}

static PyMethodDef METHODS[] = {{"launch", (PyCFunction)launch, METH_FASTCALL, "Returns whether it was launched."}, {0}};
static PyTypeObject TYPE = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "jfi_launcher.Kernel",
    .tp_basicsize = sizeof(Kernel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)init,
    .tp_methods = METHODS,
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "jfi_launcher", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_jfi_launcher(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_LAZY);
    if (cuda != NULL) {
        *(void **)&launch_kernel = dlsym(cuda, "cuLaunchKernelEx");
        *(void **)&encode_tiled = dlsym(cuda, "cuTensorMapEncodeTiled");
        *(void **)&error_string = dlsym(cuda, "cuGetErrorString");
    }
    if (launch_kernel == NULL || encode_tiled == NULL || error_string == NULL) {
        PyErr_SetString(PyExc_ImportError, "libcuda.so.1 has no cuLaunchKernelEx or cuTensorMapEncodeTiled");
        return NULL;
    }
    DATA_PTR = PyUnicode_InternFromString("data_ptr");
    DTYPE = PyUnicode_InternFromString("dtype");
    BASE = PyUnicode_InternFromString("base");
    SHAPE = PyUnicode_InternFromString("shape");
    STRIDES = PyUnicode_InternFromString("strides");
    BLOCK_SHAPE = PyUnicode_InternFromString("block_shape");
    PyObject *module = PyModule_Create(&MODULE);
    if (module == NULL || PyType_Ready(&TYPE) < 0) return NULL;
    Py_INCREF(&TYPE);
    if (PyModule_AddObject(module, "Kernel", (PyObject *)&TYPE) < 0) return NULL;
    return module;
}
