"""DeepSpeedExamples' CIFAR script in its shape: flags, an engine from them and a dataset, its own loop. Ten colors."""

import argparse
import json
import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--out", default="out")
parser = deepspeed.add_config_arguments(parser)


class Images(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        noise = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i))
        return 0.1 * noise + (i % 10) / 5 - 1, i % 10


def main(args: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    features = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    net = nn.Sequential(*features, nn.Linear(72, 64), nn.ReLU(), nn.Linear(64, 10))
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    engine, _, loader, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters, training_data=Images())
    device = get_accelerator().device_name(engine.local_rank)
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.half if engine.fp16_enabled() else torch.float
    losses = []
    for _ in range(args.epochs):
        for inputs, labels in loader:
            loss = nn.functional.cross_entropy(engine(inputs.to(device).to(dtype)), labels.to(device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.save_checkpoint(args.out, client_state={"epoch": args.epochs})
    if torch.distributed.get_rank() == 0:
        facts = {
            "world": torch.distributed.get_world_size(),
            "stage": engine.zero_optimization_stage(),
            "losses": losses,
            "local_rank": args.local_rank,
            "flag": args.deepspeed,
        }
        print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(parser.parse_args())
