"""Calls of the launcher in C, with a driver that records them; run alone, without torch and without a GPU.

python launcher_calls.py FOLDER VERSION     of jfi_launcher.so and of the recording libcuda.so.1; of CUDA's driver
"""

import ctypes
import struct
import sys
from threading import Thread
from types import SimpleNamespace

HALF, FLOAT, WIDE = object(), object(), 2**40


class Tensor:
    def __init__(self, dtype: object, address: int) -> None:
        self.dtype, self.address = dtype, address

    def data_ptr(self) -> int:
        return self.address


class Size(tuple):
    """As torch.Size, no tuple itself."""


class Driver:
    """The recording driver."""

    def __init__(self, folder: str, version: int) -> None:
        self.library = ctypes.CDLL(f"{folder}/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # dlopen finds it by this name
        self.library.recorded.restype = ctypes.POINTER(ctypes.c_ubyte)
        ctypes.c_int.in_dll(self.library, "version").value = version

    def expect(self, format: str) -> None:
        """The parameters of the next launches are of these types, and "m" 128 bytes of a descriptor."""
        sizes = [128 if kind == "m" else struct.calcsize(kind) for kind in format]
        self.library.expect((ctypes.c_int * len(sizes))(*sizes), len(sizes))

    def recorded(self, format: str) -> list:
        read = []
        for i, kind in enumerate(format):
            size = 128 if kind == "m" else struct.calcsize(kind)
            (value,) = [bytes(self.library.recorded(i)[:size])]
            read.append(list(struct.unpack("16Q", value)) if kind == "m" else struct.unpack(kind, value)[0])
        return read

    def configured(self) -> list[int]:
        return [self.library.configured(i) for i in range(5)]

    @property
    def retained(self) -> int:
        return ctypes.c_int.in_dll(self.library, "retained").value


def raises(error: type, text: str, function, *args) -> None:
    try:
        function(*args)
    except error as found:
        assert text in str(found), found
    else:
        raise AssertionError(f"{text}: no error")


def main(folder: str, version: int) -> None:
    driver = Driver(folder, version)
    sys.path.insert(0, folder)
    from jfi_launcher import Kernel

    format = "m" + "iiqq" + "m" + "iiiqqq" + "QQQ" + "iqf" + "QQ"
    driver.expect(format)
    # (dimensions, swizzle, bytes of an element, its type), the descriptor's tile, and that of one load.
    half = struct.pack("14i", 2, 3, 2, 6, 64, 128, 0, 0, 0, 64, 64, 0, 0, 0)
    cube = struct.pack("14i", 3, 3, 2, 9, 1, 16, 64, 0, 0, 64, 16, 1, 0, 0)
    dtypes, aligned = (HALF, None, HALF, HALF, None, FLOAT, FLOAT), bytes((1, 1, 1, 0))
    kernel = Kernel(7, 0, 128, 4096, dtypes, half + bytes(56) + cube, aligned, b"ilf")
    base = Tensor(HALF, 0x7F00_0000_0040)

    def flat(**changes: object) -> SimpleNamespace:
        usual = {"base": base, "shape": Size((100, 256)), "strides": (256, 1), "block_shape": [64, 128]}
        return SimpleNamespace(**usual | changes)

    def deep() -> SimpleNamespace:
        return SimpleNamespace(base=base, shape=[7, 900, 64], strides=Size((57600, 64, 1)), block_shape=[1, 16, 64])

    x, y, z = Tensor(HALF, 0x7F00_0000_0100), Tensor(FLOAT, 0x7F00_0000_0200), Tensor(FLOAT, 0x7F00_0000_0304)

    def launch(kernel: Kernel = kernel, **changes: object) -> bool:
        usual = {"grid": (3, 2, 1), "stream": 0, "tensors": ((x, None), y, z), "numbers": (-5, WIDE, 0.1)}
        return kernel.launch(*(usual | {"descriptors": (flat(), None, deep())} | changes).values())

    assert launch() is True
    # Drivers up to 13.1 get a bit cleared in the descriptor of less than 128 KB.
    maps = [[base.address, 0 if version <= 13010 else 2**21, 6, 2, 3, 256, 64, 512, 100, 64, *[0] * 6]]
    maps += [[base.address, 2**21, 9, 3, 3, 64, 64, 128, 900, 16, 115200, 7, 1, 0, 0, 0]]
    numbers = [-5, WIDE, struct.unpack("f", struct.pack("f", 0.1))[0]]
    sizes = [100, 256, 256, 1], [7, 900, 64, 57600, 64, 1]
    addresses = [x.address, y.address, z.address]
    assert driver.recorded(format) == [maps[0], *sizes[0], maps[1], *sizes[1], *addresses, *numbers, 0, 0]
    assert driver.configured() == [3, 2, 1, 128, 4096]

    others = {
        "another dtype": {"tensors": ((y, None), y, z)},
        "a tensor where there was none": {"tensors": ((x, y), y, z)},
        "none where there was a tensor": {"tensors": ((x, None), None, z)},
        "a tensor off its border": {"tensors": ((x, None), Tensor(FLOAT, 0x304), z)},
        "more tensors": {"tensors": ((x, None), y, z, z)},
        "fewer tensors": {"tensors": ((x, None), y)},
        "an integer of more than 32 bits": {"numbers": (2**31, 1, 0.1)},
        "an integer of more than 64 bits": {"numbers": (1, 2**63, 0.1)},
        "a float for an integer": {"numbers": (1.0, 1, 0.1)},
        "an integer for a float": {"numbers": (1, 1, 1)},
        "fewer numbers": {"numbers": (1, 1)},
        "another tile": {"descriptors": (flat(block_shape=[32, 128]), None, deep())},
        "more dimensions": {"descriptors": (deep(), None, deep())},
        "a stride within rows": {"descriptors": (flat(strides=(256, 2)), None, deep())},
        "rows that 32 bits do not count": {"descriptors": (flat(shape=(2**31, 256)), None, deep())},
        "another dtype of a tile": {"descriptors": (flat(base=y), None, deep())},
        "a tile off its border": {"descriptors": (flat(base=Tensor(HALF, 8)), None, deep())},
        "a tile where there was none": {"descriptors": (flat(), flat(), deep())},
        "no tile": {"descriptors": (None, None, deep())},
        "fewer tiles": {"descriptors": (flat(),)},
        "more programs than 32 bits count": {"grid": (2**31, 1, 1)},
        "a negative number of programs": {"grid": (-1, 1, 1)},
        "more programs than the second dimension takes": {"grid": (1, 2**16, 1)},
        "more programs in all": {"grid": (2**15, 2**15, 2)},
    }
    for name, changes in others.items():
        assert launch(**changes) is False, name
    assert launch() is True and launch(grid=(0, 2, 1)) is True
    raises(TypeError, "launch takes a grid, a stream", kernel.launch, (1, 1, 1))

    threads_get_a_context(driver, Kernel, launch)
    memory_is_freed(Kernel, launch, (x, y, z, base, HALF, FLOAT))
    parameters_are_limited(driver, Kernel, x)
    driver.expect("Q")
    bad = Kernel(13, 0, 128, 0, (HALF,), b"", b"\1", b"")
    raises(RuntimeError, "CUDA could not launch a kernel: invalid argument", bad.launch, (1, 1, 1), 0, (x,), (), ())


def threads_get_a_context(driver: Driver, Kernel: type, launch) -> None:
    """A thread without one gets device 0's, once; none goes to another device than the current one."""
    other, results, before = Kernel(7, 1, 128, 0, (), b"", b"", b""), [], driver.retained

    def launch_in_thread() -> None:
        results.append(other.launch((1, 1, 1), 0, (), (), ()))
        results.extend([launch(), launch(), other.launch((1, 1, 1), 0, (), (), ())])

    thread = Thread(target=launch_in_thread)
    thread.start()
    thread.join()
    assert results == [False, True, True, False] and driver.retained == before + 1


def memory_is_freed(Kernel: type, launch, objects: tuple) -> None:
    counts = [sys.getrefcount(one) for one in objects]
    for i in range(10_000):
        assert launch() is True and launch(numbers=(i, 1, "x")) is False
        Kernel(7, 0, 128, 0, (HALF, FLOAT), b"", b"\1\1", b"")
    assert [sys.getrefcount(one) for one in objects] == counts


def parameters_are_limited(driver: Driver, Kernel: type, x: Tensor) -> None:
    """As many as a step of 32 tables has, and no more than 256 with both of Triton's."""
    format = "Q" * 254
    driver.expect(format)
    many = Kernel(7, 0, 128, 0, (HALF,) * 254, b"", b"\1" * 254, b"")
    assert many.launch((1, 1, 1), 0, (x,) * 254, (), ()) is True
    assert driver.recorded(format) == [x.address] * 254
    for tensors, numbers in ((255, 0), (250, 5)):
        args = (HALF,) * tensors, b"", b"\1" * tensors, b"i" * numbers
        raises(ValueError, "more parameters than the launcher takes", Kernel, 7, 0, 128, 0, *args)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    print("all calls are right")
