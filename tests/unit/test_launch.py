"""mpirun's command line, and what processes know and pass on of the run that they are in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from splash_trt import environment, launch


def fake_mpirun(folder: Path, version: str) -> Path:
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{version}'\n")
    program.chmod(0o755)
    return program


class TestMpirunCommand:
    def test_the_wheel_beside_this_python(self) -> None:
        command = launch.mpirun_command(3, ["python", "x.py"])
        assert command[0] == str(Path(sys.executable).parent / "mpirun")
        assert command[-4:] == ["-n", "3", "python", "x.py"]
        assert "nanosleep" in command and "self,sm" in command

    @pytest.mark.parametrize(
        ("version", "transport", "nanosleep"),
        [
            ("mpirun (Open MPI) 4.1.6", "self,vader", False),
            ("mpirun (Open MPI) 5.0.11", "self,sm", True),
            ("prterun (PRRTE) 3.0\nmpirun (Open MPI) 6.0.0", "self,sm", True),
        ],
    )
    def test_flags_follow_the_release(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, transport: str, nanosleep: bool
    ) -> None:
        fake_mpirun(tmp_path, version)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        command = launch.mpirun_command(2, ["x"])
        assert transport in command and ("nanosleep" in command) is nanosleep

    @pytest.mark.parametrize(("version", "transport"), [("4.1.6", "vader"), ("5.0.11", "sm")])
    def test_ranks_on_gpus_may_use_their_cores_and_get_plans_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, transport: str
    ) -> None:
        fake_mpirun(tmp_path, f"mpirun (Open MPI) {version}")
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        command = launch.mpirun_command(2, ["x"], on_gpus=True)
        assert "nanosleep" not in command and f"self,{transport}" in command
        assert command[command.index("mpi_yield_when_idle") + 1] == "0"
        assert command[command.index(f"btl_{transport}_eager_limit") + 1] == "65536"

    def test_path_is_searched_next(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        program = fake_mpirun(tmp_path, "mpirun (Open MPI) 4.1.6")
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert launch.mpirun_command(2, ["x"])[0] == str(program)

    def test_errors_say_what_to_do(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ValueError, match="num_ranks: 0"):
            launch.mpirun_command(0, ["x"])
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(FileNotFoundError, match=r"splash-trt\[mpi\]"):
            launch.mpirun_command(2, ["x"])
        fake_mpirun(tmp_path, "mpiexec of another kind 3.2")
        with pytest.raises(ValueError, match="another kind"):
            launch.mpirun_command(2, ["x"])


@pytest.fixture
def srun_task(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What all tasks of `srun --mpi=pmix` have of the variables that matter, but for the step and its size."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "PMIX_", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in (("PMIX_RANK", "3"), ("PMIX_NAMESPACE", "x"), ("SLURM_PROCID", "3"), ("SLURM_JOB_ID", "7")):
        monkeypatch.setenv(name, value)
    return monkeypatch


class TestEnvironment:
    def test_children_are_no_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
        monkeypatch.setenv("PMIX_RANK", "1")
        monkeypatch.setenv("KEPT", "yes")
        assert environment.under_mpirun()
        child = environment.for_child()
        assert child["KEPT"] == "yes" and not any(name.startswith(("OMPI_", "PMIX_")) for name in child)

    def test_settings_for_mpi_stay_outside_of_a_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A machine without ssh, for example, needs OMPI_MCA_plm=isolated for any mpirun to start."""
        monkeypatch.delenv("OMPI_COMM_WORLD_SIZE", raising=False)
        monkeypatch.delenv("PMI_SIZE", raising=False)
        monkeypatch.setenv("OMPI_MCA_plm", "isolated")
        assert environment.for_mpirun()["OMPI_MCA_plm"] == "isolated"

    @pytest.mark.parametrize("step", ["SLURM_STEP_ID", "SLURM_STEPID"])
    @pytest.mark.parametrize("tasks", ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])
    def test_a_task_of_srun_is_a_rank(self, srun_task: pytest.MonkeyPatch, step: str, tasks: str) -> None:
        srun_task.setenv(step, "0")
        srun_task.setenv(tasks, "4")
        assert (environment.under_mpirun(), environment.mpi_rank(), environment.mpi_size()) == (True, 3, 4)
        child = environment.for_child()
        assert child["SLURM_JOB_ID"] == "7" and step not in child
        assert not any(name.startswith(("PMIX_", "SLURM_PROCID")) for name in child)

    def test_a_step_may_be_smaller_than_its_job(self, srun_task: pytest.MonkeyPatch) -> None:
        for name, value in (("SLURM_STEP_ID", "2"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_NTASKS", "16")):
            srun_task.setenv(name, value)
        assert environment.mpi_size() == 4

    @pytest.mark.parametrize(
        "changes",
        [
            {"PMIX_RANK": None},  # srun --mpi=none
            {"SLURM_NTASKS": "1"},
            {"SLURM_STEP_ID": None},  # a shell of salloc's, on the machine that asked for the job
            {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # a batch script
            {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # an interactive step
        ],
    )
    def test_others_of_slurm_are_none(self, srun_task: pytest.MonkeyPatch, changes: dict[str, str | None]) -> None:
        srun_task.setenv("PMIX_RANK", "0")
        for name, value in {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", **changes}.items():
            if value is None:
                srun_task.delenv(name, raising=False)
            else:
                srun_task.setenv(name, value)
        assert (environment.under_mpirun(), environment.mpi_rank(), environment.mpi_size()) == (False, 0, 1)
        assert "PMIX_RANK" not in environment.for_mpirun()

    def test_ranks_of_an_mpirun_in_slurm_are_its_own(self, srun_task: pytest.MonkeyPatch) -> None:
        """Its daemons on other machines are tasks of an srun, and the ranks inherit their variables."""
        for name, value in (("SLURM_STEP_ID", "0"), ("SLURM_NTASKS", "2"), ("PMIX_RANK", "5")):
            srun_task.setenv(name, value)
        srun_task.setenv("OMPI_COMM_WORLD_SIZE", "8")
        srun_task.setenv("OMPI_COMM_WORLD_RANK", "5")
        assert (environment.mpi_rank(), environment.mpi_size()) == (5, 8)

    def test_ranks_keep_their_memory_unless_told_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
        assert int(environment.for_mpirun()["MALLOC_TRIM_THRESHOLD_"]) > 1 << 20
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "77")
        assert environment.for_mpirun()["MALLOC_TRIM_THRESHOLD_"] == "77"

    def test_root_may_start_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        assert environment.for_mpirun()["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "OMPI_ALLOW_RUN_AS_ROOT" not in environment.for_mpirun()
