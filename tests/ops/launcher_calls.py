"""Calls of the launcher in C, beside a driver that records them; run alone, without torch and without a GPU.

python launcher_calls.py FOLDER     of jfi_launcher.so and of the recording libcuda.so.1
"""

import ctypes
import struct
import sys
from types import SimpleNamespace

folder = sys.argv[1]
driver = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # dlopen finds it by this name
driver.recorded.restype = ctypes.POINTER(ctypes.c_ubyte)
sys.path.insert(0, folder)
from jfi_launcher import Kernel  # noqa: E402

HALF, FLOAT = object(), object()
BLOCK = [64, 32]


class Tensor:
    def __init__(self, dtype: object, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


def recorded(format: str) -> list:
    """The parameters of the last launch, of these types and 128 bytes of a descriptor ("m")."""
    read = []
    for i, kind in enumerate(format):
        size = 128 if kind == "m" else struct.calcsize(kind)
        (value,) = [bytes(driver.recorded(i)[:size])]
        read.append(struct.unpack("9Q", value[:72]) if kind == "m" else struct.unpack(kind, value)[0])
    return read


def expect(format: str) -> None:
    sizes = [128 if kind == "m" else struct.calcsize(kind) for kind in format]
    driver.expect((ctypes.c_int * len(sizes))(*sizes), len(sizes))


FORMAT = "m" + "iiqq" + "QQQ" + "iqf" + "QQ"
expect(FORMAT)
tiles = ((HALF, BLOCK, 3, 2, 6, (64, 32)), (None, None, 0, 0, 0, (0, 0)))
leaves = ((HALF, True), (None, True), (FLOAT, True), (FLOAT, False))
kernel = Kernel(7, 128, 4096, tiles, leaves, "ilf")
descriptor = SimpleNamespace(base=Tensor(HALF, 0x7F00_0000_0040), shape=(100, 96), strides=(96, 1), block_shape=BLOCK)
x, y, z = Tensor(HALF, 0x7F00_0000_0100), Tensor(FLOAT, 0x7F00_0000_0200), Tensor(FLOAT, 0x7F00_0000_0304)
usual = {"grid": (3, 2, 1), "stream": 0, "tensors": ((x, None), y, z), "numbers": (-5, 2**40, 0.1)}
usual["descriptors"] = (descriptor, None)


def launch(**changes: object) -> bool:
    return kernel.launch(*(usual | changes).values())


assert launch() is True
descriptor_made = (descriptor.base.address, 96, 100, 192, 32, 64, 6, 2, 3)
numbers = [-5, 2**40, struct.unpack("f", struct.pack("f", 0.1))[0]]
assert recorded(FORMAT) == [descriptor_made, 100, 96, 96, 1, x.address, y.address, z.address, *numbers, 0, 0]
assert [driver.configured(i) for i in range(5)] == [3, 2, 1, 128, 4096]

others = {
    "another dtype": {"tensors": ((y, None), y, z)},
    "a tensor where there was none": {"tensors": ((x, y), y, z)},
    "none where there was a tensor": {"tensors": ((x, None), None, z)},
    "a tensor off its border": {"tensors": ((x, None), Tensor(FLOAT, 0x304), z)},
    "more tensors": {"tensors": ((x, None), y, z, z)},
    "fewer tensors": {"tensors": ((x, None), y)},
    "an integer of more than 32 bits": {"numbers": (2**31, 1, 0.1)},
    "a float for an integer": {"numbers": (1.0, 1, 0.1)},
    "a text for a float": {"numbers": (1, 1, "0.1")},
    "fewer numbers": {"numbers": (1, 1)},
    "another tile": {"descriptors": (SimpleNamespace(**vars(descriptor) | {"block_shape": [32, 32]}), None)},
    "another dtype of a tile": {"descriptors": (SimpleNamespace(**vars(descriptor) | {"base": y}), None)},
    "a tile off its border": {"descriptors": (SimpleNamespace(**vars(descriptor) | {"base": Tensor(HALF, 8)}), None)},
    "a tile where there was none": {"descriptors": (descriptor, descriptor)},
    "no tile": {"descriptors": (None, None)},
    "fewer tiles": {"descriptors": (descriptor,)},
}
for name, changes in others.items():
    assert launch(**changes) is False, name
assert launch() is True and launch(grid=(0, 2, 1)) is True

expect("QQQ")
try:
    Kernel(13, 128, 0, (), ((HALF, True),), "").launch((1, 1, 1), 0, (x,), (), ())
except RuntimeError as error:
    assert str(error) == "CUDA could not launch a kernel: invalid argument"
else:
    raise AssertionError("a launch that fails must raise")
try:
    Kernel(7, 128, 0, (), ((HALF, True),) * 65, "")
except ValueError as error:
    assert "more parameters than the launcher takes" in str(error)
else:
    raise AssertionError("a kernel of too many parameters must be refused")
print("all calls are right")
