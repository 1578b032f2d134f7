"""One pure parser per launcher family: environment mapping in, `Reading` out.

    family      module       decided by
    torchrun    torchrun.py  TORCHELASTIC_RUN_ID; the same names set by hand are "env"
    openmpi     mpi.py       OMPI_COMM_WORLD_*
    pals        pals.py      PALS_RANKID
    flux        flux.py      FLUX_TASK_RANK
    mvapich2    mpi.py       MV2_COMM_WORLD_*
    hydra       mpi.py       PMI_RANK with MPI_LOCALRANKID
    srun        srun.py      SLURM_STEP_ID, for a step that srun started

`PARSERS` holds them in the order in which they count: the first complete row wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gradsync.runtime.launchers.flux import read_flux
from gradsync.runtime.launchers.mpi import read_hydra, read_mvapich2, read_openmpi
from gradsync.runtime.launchers.pals import read_pals
from gradsync.runtime.launchers.reading import Reading
from gradsync.runtime.launchers.srun import read_srun
from gradsync.runtime.launchers.torchrun import read_torchrun

PARSERS: tuple[Callable[[Mapping[str, str]], Reading], ...] = (
    read_torchrun,
    read_openmpi,
    read_pals,
    read_flux,
    read_mvapich2,
    read_hydra,
    read_srun,
)
"""Every family's parser, the one that counts most first."""
