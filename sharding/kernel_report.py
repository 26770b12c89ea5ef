"""What the kernels of a compiled program take: registers, spills, shared memory, instructions.

Reads what the compiler dumps next to the program: the PTX of each kernel, which `ptxas`
assembles again and counts, and the launches, which name the shared memory Triton asks for.
"""

import contextlib
import dataclasses
import importlib.util
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from dsv41_jax.forward import COMPILER_OPTIONS
from sharding.deviceless import h100_devices, target_of

SHARED_LIMIT = 232448  # bytes of shared memory a block of threads may ask for on H100
# The last names what emitters dump: newer JAX dumps the PTX of a kernel only if asked.
_DUMP = {"xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "ptx"}
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_ENTRY = re.compile(r"\.entry (\w+)\(")
_LAUNCH = re.compile(r"kCustomKernel .*\] (\S+) grid: .* threads: \[(\d+),.*memory: (\d+) bytes")
_PALLAS = re.compile(r'/(\w+)/pallas_call"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelReport:
    """One kernel of a compiled program.

    Attributes:
      name: of the kernel; variants of one name end in `__1`, `__2`.
      pallas: whether it is written by hand; otherwise the compiler made it.
      launches: places in the program that run it.
      threads: in a block.
      registers: of a thread.
      spill_bytes: registers that a thread keeps in memory, bytes stored.
      shared_bytes: shared memory of a block, static and asked for at launch.
      tf32: tensor-core instructions on TF32.
      wgmma: tensor-core instructions of four warps.
      mma: tensor-core instructions of one warp.
    """

    name: str
    pallas: bool
    launches: int
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tf32: int
    wgmma: int
    mma: int

    @property
    def faults(self) -> tuple[str, ...]:
        """What a kernel must not do, in words; empty where all is well."""
        found = []
        if self.spill_bytes:
            found.append(f"kernel {self.name} spills {self.spill_bytes} bytes of registers")
        if self.shared_bytes > SHARED_LIMIT:
            found.append(
                f"kernel {self.name} asks for {self.shared_bytes} bytes of shared memory; "
                f"H100 has {SHARED_LIMIT}"
            )
        if self.tf32:
            found.append(f"kernel {self.name} multiplies in TF32, which is not float32")
        return tuple(found)


def compile_kernels(fn: Callable[..., Any], *arguments: Any) -> tuple[KernelReport, ...]:
    """Compiles `fn` for one H100 that is not there and reports its kernels.

    Args:
      fn: function of arrays.
      *arguments: pytrees of `ShapeDtypeStruct`s.

    Raises:
      RuntimeError: the `cuda12` extra is not installed.
    """
    return compile_with_report(lower_for_h100(fn, *arguments))[1]


def lower_for_h100(
    fn: Callable[..., Any], *arguments: Any, donated: Sequence[int] = ()
) -> jax.stages.Lowered:
    """Lowers `fn` for one H100 that is not there.

    Args:
      fn: function of arrays.
      *arguments: pytrees of `ShapeDtypeStruct`s.
      donated: which of them the results may overwrite.

    Raises:
      NoCompilerError: the `cuda12` extra is not installed.
    """
    sharding = SingleDeviceSharding(h100_devices(1)[0])
    placed = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
    )
    jitted = jax.jit(fn, donate_argnums=tuple(donated), compiler_options=COMPILER_OPTIONS)
    with target_of("h100-80"):
        return jitted.trace(*placed).lower()


def compile_with_report(
    lowered: jax.stages.Lowered,
) -> tuple[jax.stages.Compiled, tuple[KernelReport, ...]]:
    """Compiles a program lowered for H100 and reports all of its kernels.

    Returns:
      The program, and its kernels by name.

    Raises:
      RuntimeError: `ptxas` is not installed or refuses a kernel, or the compiler hides one.
    """
    assembler = _ptxas()
    with tempfile.TemporaryDirectory() as folder, _without_cache():
        compiled = lowered.compile({"xla_dump_to": folder} | _DUMP)
        dump = pathlib.Path(folder)
        launches = _launches(path.read_text() for path in dump.glob("*.thunk_sequence.txt"))
        pallas = set(_PALLAS.findall(compiled.as_text()))
        reports = []
        for path in dump.glob("*.ptx"):
            ptx = path.read_text()
            entry = _ENTRY.search(ptx)
            if entry and entry[1] in launches:
                reports.append(_report(assembler, path, entry[1], launches[entry[1]], pallas))
    reported = {report.name for report in reports}
    unknown = sorted(name for name in launches.keys() - reported if _base(name) in pallas)
    if unknown:
        raise RuntimeError(
            f"the compiler of JAX {jax.__version__} shows no PTX of the kernels "
            f"{', '.join(unknown)}, so their registers are unknown; use an older JAX"
        )
    return compiled, tuple(sorted(reports, key=lambda report: report.name))


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """A cached program dumps nothing, and one for absent devices cannot be read back."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _launches(texts: Iterable[str]) -> dict[str, list[tuple[int, int]]]:
    """Threads and bytes of shared memory of every launch, by kernel."""
    found: dict[str, list[tuple[int, int]]] = {}
    for text in texts:
        for name, threads, shared in _LAUNCH.findall(text):
            found.setdefault(name, []).append((int(threads), int(shared)))
    return found


def _base(name: str) -> str:
    """The name that variants of a kernel share."""
    return re.sub(r"__\d+$", "", name)


def _report(
    assembler: pathlib.Path,
    path: pathlib.Path,
    name: str,
    launches: list[tuple[int, int]],
    pallas: set[str],
) -> KernelReport:
    ptx = path.read_text()
    target = _TARGET.search(ptx)[1]
    run = subprocess.run(
        [assembler, f"-arch={target}", "-v", path, "-o", path.with_suffix(".cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"ptxas refuses kernel {name}: {run.stderr.strip()[:300]}")
    said = run.stderr + run.stdout
    threads, dynamic = max(launches)

    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, said))

    return KernelReport(
        name=name,
        pallas=_base(name) in pallas,
        launches=len(launches),
        threads=threads,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores"),
        shared_bytes=number(r"(\d+) bytes smem") + dynamic,
        tf32=len(re.findall(r"mma\S*\.tf32", ptx)),
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
    )


def _ptxas() -> pathlib.Path:
    found = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cuda_nvcc")
    if not found:
        raise RuntimeError("kernels are assembled with ptxas; install the cuda12 extra")
    return pathlib.Path(found.submodule_search_locations[0]) / "bin" / "ptxas"
