"""The guard against CPUs that advertise AMX without granting it."""

import os

import pytest

from looptim.training import amx as cpu


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.delenv(cpu.VARIABLE, raising=False)
    monkeypatch.setenv("LOOPTIM_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu, "_advertises_amx", lambda: True)
    return monkeypatch


def test_a_dying_probe_switches_amx_off_and_is_remembered(machine, tmp_path):
    machine.setattr(cpu, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    cpu.guard_bf16()
    assert os.environ.pop(cpu.VARIABLE) == "AVX512_CORE_BF16"
    machine.setattr(cpu, "PROBE", "")
    cpu.guard_bf16()
    assert os.environ.pop(cpu.VARIABLE) == "AVX512_CORE_BF16"


def test_a_probe_that_fails_for_another_reason_is_not_remembered(machine, tmp_path):
    machine.setattr(cpu, "PROBE", "raise MemoryError")
    cpu.guard_bf16()
    assert os.environ.pop(cpu.VARIABLE) == "AVX512_CORE_BF16"
    assert not list(tmp_path.iterdir())


def test_a_working_amx_is_left_alone(machine):
    machine.setattr(cpu, "PROBE", "")
    cpu.guard_bf16()
    assert cpu.VARIABLE not in os.environ


def test_the_users_own_choice_stands(machine):
    machine.setenv(cpu.VARIABLE, "AVX2")
    machine.setattr(cpu, "PROBE", "raise SystemExit(1)")
    cpu.guard_bf16()
    assert os.environ[cpu.VARIABLE] == "AVX2"
