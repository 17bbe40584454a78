"""How long a run trains: so many steps, or so many epochs, and what its last batch is. Pure.

Epochs are counted in samples: batches go over epoch ends without a gap, so only the batch that ends
the run may be smaller. Steps are counted as such, and all have a whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ftrain.errors import ConfigError

if TYPE_CHECKING:
    from ftrain.config import Config

MOST_STEPS = 2**31 - 1  # the step is an int32 on the device


class Target(NamedTuple):
    """Where a run ends.

    Attributes:
      steps: the committed steps at the end of a run that begins at step 0 and is not lengthened.
      samples: the cursor at the end, if it is that which ends the run; None: `steps` does.
      batch_size: samples of every step but a last one.
    """

    steps: int
    samples: int | None
    batch_size: int

    def reached(self, step: int, cursor: int) -> bool:
        """Whether a run with that committed state has nothing left to do."""
        return step >= self.steps if self.samples is None else cursor >= self.samples

    def batch(self, cursor: int) -> int:
        """The samples of the step that starts at `cursor`."""
        left = self.batch_size if self.samples is None else self.samples - cursor
        return min(self.batch_size, left)

    def last_step(self, step: int, cursor: int) -> int:
        """The step that will be the last, seen from a committed state.

        One more than `steps` for a run that once ended with a smaller batch and was lengthened.
        """
        if self.samples is None:
            return self.steps
        left = max(0, self.samples - cursor)
        return step + -(-left // self.batch_size)

    def shorter_shard(self, cursor: int, batch_shards: int) -> int:
        """The samples of the one shard that is cut short in the last step; 0: none is.

        Args:
          cursor: of any committed state on the way to the target.
          batch_shards: the shards of a whole batch.
        """
        if self.samples is None:
            return 0
        return max(0, self.samples - cursor) % (self.batch_size // batch_shards)


def target_of(config: Config, length: int) -> Target:
    """The target of a config over a data set of `length` samples.

    Raises:
      ConfigError: that many epochs are more steps than can be counted.
    """
    if config.epochs is None:
        return Target(config.steps, None, config.batch_size)
    samples = config.epochs * length
    steps = -(-samples // config.batch_size)
    if steps > MOST_STEPS:
        raise ConfigError(
            f"epochs: {config.epochs} of {length} samples are {steps} steps of batch_size="
            f"{config.batch_size}; at most {MOST_STEPS} can be counted"
        )
    return Target(steps, samples, config.batch_size)
