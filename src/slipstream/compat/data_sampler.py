"""`deepspeed.runtime.data_pipeline.data_sampling.data_sampler`: the curriculum's order as a batch sampler for a script's loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from slipstream.config.data import DataEfficiency
from slipstream.data.sampler import CurriculumOrder, CurriculumPlace


class DeepSpeedDataSampler:
    """Yields the sample numbers of one rank's micro-batches, over `num_epochs` passes of the dataset (a DataLoader's
    `batch_sampler`).

    The order is that of the engine's own loader: determined by the seed, without files or messages between ranks (slipstream.data).
    Without a curriculum every sample is drawn once per pass. Raises ValueError for invalid metrics or sizes.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        config = DataEfficiency.model_validate(dict(data_efficiency_config)).model_dump()
        if not 0 <= data_parallel_rank < data_parallel_size or micro_batch_size < 1 or one_epoch_total_samples < 1:
            raise ValueError(
                f"DeepSpeedDataSampler: rank {data_parallel_rank} of {data_parallel_size}, micro-batches of {micro_batch_size} of "
                f"{one_epoch_total_samples} samples: the rank must be below the size, and the other numbers above 0"
            )
        self.micro_batch_size, self.data_parallel_rank, self.drop_last = micro_batch_size, data_parallel_rank, drop_last
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.global_batch_size = self.micro_batch_times_data_parallel_size * gradient_accumulation_steps
        self.one_epoch_total_samples = one_epoch_total_samples
        self.total_samples = one_epoch_total_samples * config["data_sampling"]["num_epochs"]
        curriculum = config["data_sampling"]["curriculum_learning"]
        metrics = curriculum["curriculum_metrics"] if curriculum["enabled"] else {}
        self.order = CurriculumOrder(metrics, one_epoch_total_samples, config["seed"], self.global_batch_size)
        self._place = CurriculumPlace()

    def __len__(self) -> int:
        return self.total_samples

    def __iter__(self) -> Iterator[list[int]]:
        """From the current place on."""
        while (left := self.total_samples - self._place.consumed) > 0:
            number = min(left, self.micro_batch_times_data_parallel_size)
            if number < self.micro_batch_times_data_parallel_size and self.drop_last:
                return
            drawn, place = self.order.draw(self._place, number)
            start, end = self.get_start_end_idx()
            yield drawn[start:end].tolist()
            self._place = place

    def get_start_end_idx(self) -> tuple[int, int]:
        """This rank's places in a micro-batch of all ranks."""
        start = self.data_parallel_rank * self.micro_batch_size
        return start, start + self.micro_batch_size

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], Any]]) -> None:
        """Set the function of the step for metrics of schedule_type "custom", by name. Raises ValueError for other metrics."""
        self.order.set_schedules(schedule_func_dict)

    @property
    def consumed_samples(self) -> int:
        return self._place.consumed

    @property
    def curriculum_step(self) -> int:
        """The step, counted from 1, of the next draw."""
        return self.order.step(self._place.consumed)

    @property
    def current_difficulties(self) -> dict[str, Any]:
        return self.order.difficulties(self.curriculum_step)

    def state_dict(self) -> dict[str, Any]:
        """The position in the order: equal on all ranks, and valid for any number of ranks."""
        return self.order.state_of(self._place)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises OtherDataError, a ValueError, for the position of another dataset."""
        self._place = self.order.place_of(state_dict)
