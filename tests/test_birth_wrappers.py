"""Births in models that are wrapped: the prefixes of the wrappers are no part of a layer's name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from _programs import assert_born, train
from test_birth_forward import BAD, Between, Nested, Normalise, batches, mse


@pytest.fixture(autouse=True, scope="module")
def compiler_is_loaded() -> Iterator[None]:
    """The first compilation of a process changes optimizers for good; that is not what is tested here."""
    torch.compile(nn.Identity(), backend="eager")(torch.zeros(1))
    yield
    torch.compiler.reset()


def test_data_parallel_prefix_is_stripped() -> None:
    run = train(nn.DataParallel(Nested()), batches(), mse)
    assert_born(run, Normalise, step=BAD, phase="forward", layer="stages.0.body.norm", op="div")


def test_root_of_a_wrapped_model_is_root() -> None:
    run = train(nn.DataParallel(Between()), batches(), mse)
    assert_born(run, Between, step=BAD, phase="forward", layer="root", op="log")


def test_compiled_prefix_is_stripped() -> None:
    run = train(torch.compile(Nested(), backend="eager"), batches(), mse)
    assert_born(run, Normalise, step=BAD, phase="forward", layer="stages.0.body.norm", op="div")


def test_root_of_a_compiled_model_is_root() -> None:
    run = train(torch.compile(Between(), backend="eager"), batches(), mse)
    assert_born(run, Between, step=BAD, phase="forward", layer="root", op="log")


def test_compiled_wrapper_of_a_watched_model() -> None:
    model = Nested()
    compiled = torch.compile(model, backend="eager")
    run = train(model, batches(), lambda m, b: mse(compiled, b))
    assert_born(run, Normalise, step=BAD, phase="forward", layer="stages.0.body.norm", op="div")
