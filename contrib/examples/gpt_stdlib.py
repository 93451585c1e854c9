"""A small GPT that learns to write Python, byte by byte, from the standard library's own source text.

    python gpt_stdlib.py --steps 200                             one process
    torchrun --nproc_per_node=2 gpt_stdlib.py --steps 200        a fixed world
    fallow run -- python gpt_stdlib.py --steps 2000              elastic, inside a batch script

About 10 million parameters: --layers 6 --width 368.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's own abbreviation
from torch.utils.data import DataLoader, Dataset

import fallow

VOCABULARY = 256


class Text(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of `context` bytes over the library's top-level modules, with the next byte as target."""

    def __init__(self, context: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.bytes[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        heads = max(1, width // 32) if width % 32 == 0 else 4
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 4")
    parser.add_argument("--context", type=int, default=64, help="bytes that the model sees")
    parser.add_argument("--batch-size", type=int, default=8, help="samples in one shard")
    parser.add_argument("--global-batch", type=int, default=None, help="samples in one optimizer step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = GPT(args.layers, args.width, args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Text(args.context), batch_size=args.batch_size, shuffle=True, drop_last=True)

    run = fallow.init()
    model, optimizer, loader = run.prepare(model, optimizer, loader, global_batch=args.global_batch)
    if run.is_main:
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    for update in run.updates(loader, epochs=args.steps, max_steps=args.steps):
        for tokens, targets in update:
            logits = model(tokens.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
            loss.backward()
            update.note(loss=loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if run.is_main and update.step % 20 == 0:
            print(f"step {update.step}: loss {update.mean('loss'):.3f}, members {run.size}")
    if run.is_main:
        print(f"done after {run.step} steps")


if __name__ == "__main__":
    main()
