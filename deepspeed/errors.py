"""Every error the library raises on purpose.

Each class also inherits the builtin that a caller would expect, so `except ValueError` keeps working. Messages have three
parts: what was given, what was needed, what to do (see CONTRIBUTING, "Errors").

What does not live here: errors of one room with structure of their own (they subclass one of these in that room).
"""

from __future__ import annotations


class DeepSpeedError(Exception):
    """Base of every deliberate error of this library."""


class ConfigError(DeepSpeedError, ValueError):
    """A configuration cannot be used; the text lists every fault found, each with a correction."""


class BatchSizeError(ConfigError, AssertionError):
    """The batch triangle does not hold. Also an AssertionError, which clients of the original catch."""


class ElasticityError(ConfigError):
    """The block `elasticity` cannot be used as it is."""


class ElasticityConfigError(ElasticityError):
    """The block contradicts itself, the rest of the configuration, or what the scheduler was told."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The elastic batch does not divide over so many ranks; the text names counts that fit."""


class UnbuiltFeatureError(ConfigError, NotImplementedError):
    """A documented feature that this version does not have yet was asked for."""


class UsageError(DeepSpeedError, RuntimeError):
    """A call came at the wrong moment or with arguments that cannot work together."""


class ArgumentError(UsageError, AssertionError, ValueError):
    """An argument of a public call is unusable. Also an AssertionError, which clients of the original catch."""


class NonFiniteError(DeepSpeedError, ArithmeticError):
    """Training cannot go on because values stay infinite or NaN."""


class AcceleratorError(DeepSpeedError, RuntimeError):
    """A device, its driver or its torch plug-in is missing or cannot do what was asked."""


class CommError(DeepSpeedError, RuntimeError):
    """Ranks could not meet: no process group, a late or dead peer, or ranks that do different things."""


class PipelineError(DeepSpeedError, RuntimeError):
    """A pipeline cannot be built as asked, was called in a way it has no meaning for, or one of its stages failed."""


class PipelineDataEndedError(PipelineError, StopIteration):
    """The iterator ended before it gave all micro-batches of a batch. Also a StopIteration, which loops over data catch."""


class CheckpointError(DeepSpeedError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint of that tag; the text lists the tags there are."""


class CheckpointDamagedError(CheckpointError):
    """A file is shorter than, or differs from, what the manifest says; the text names it."""


class FileIoError(DeepSpeedError, OSError):
    """A file could not be opened, read or written as asked; has the `errno` of the cause."""

    def __str__(self) -> str:
        return str(self.strerror)


class HostMemoryError(DeepSpeedError, MemoryError):
    """The host has not the memory that was asked for."""


class LaunchError(DeepSpeedError, RuntimeError):
    """The launcher cannot start the job as asked."""


class MonitorError(DeepSpeedError, RuntimeError):
    """What a monitor needs besides its package cannot be had, such as a free port."""


class MissingPackageError(DeepSpeedError, ImportError):
    """An optional package is needed; the text holds the install command."""
