"""A guard and hooks that torch needs, without a CUDA device, to index or differentiate tensors that claim to be on one.
Compiled once per version of torch, and loaded before it, because torch asks for the hooks once."""

import ctypes
import hashlib
import importlib
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>
using namespace at;
struct Hooks final : CUDAHooksInterface {
  Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 8; }
  DeviceIndex deviceCount() const override { return 8; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, Hooks)
extern "C" void take_guard() {
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>());
}
"""


def compiler() -> str | None:
    return shutil.which("g++")


def load() -> None:
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    torch = Path(spec.submodule_search_locations[0])
    told = f"{SOURCE}{torch}{(torch / 'version.py').stat().st_mtime_ns}"
    library = Path(tempfile.gettempdir()) / f"oppo-cuda-stub-{hashlib.sha256(told.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        _compile(torch, library)
    for each in (torch / "lib" / "libc10.so", torch / "lib" / "libtorch_cpu.so", library):
        stub = ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")  # which, built for CUDA, registers its own guard
    stub.take_guard()


def _compile(torch: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "stub.cpp", Path(folder) / "stub.so"
        source.write_text(SOURCE)
        subprocess.run(
            ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch}/include", "-o", built, source,
             f"-L{torch}/lib", "-lc10", "-ltorch_cpu"],
            check=True,
        )  # fmt: skip
        shutil.copy(built, library.with_suffix(".new"))
    library.with_suffix(".new").rename(library)  # whole, or not there
