"""The script of `nano_plain.py` under Fallow.

usage: nano_fallow.py FILE [PACE]
"""

# ruff: noqa: N806, N812  # its own style

import argparse
import inspect
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import fallow

out, pace = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
batch_size, block_size, gradient_accumulation_steps = 4, 16, 6
max_iters, eval_interval, eval_iters, log_interval = 40, 10, 3, 4
learning_rate, warmup_iters, grad_clip, n_embd, n_head, dropout = 1e-3, 10, 1.0, 32, 4, 0.1
torch.set_num_threads(1)
torch.manual_seed(1337)
text = torch.tensor(list(inspect.getsource(argparse).encode()))
data = {"train": text[:-9000], "val": text[-9000:]}
run = fallow.init()
master_process = run.is_main


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, n_head, C // n_head).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, C)
        x = x + self.c_proj(y)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.Sequential(Block(), Block()), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, 256, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.h(x)))
        return F.cross_entropy(logits.view(-1, 256), targets.view(-1))


def get_batch(split):
    ix = torch.randint(len(data[split]) - block_size, (batch_size,))
    x = torch.stack([data[split][i : i + block_size] for i in ix])
    y = torch.stack([data[split][i + 1 : i + 1 + block_size] for i in ix])
    return x, y


@torch.no_grad()
def estimate_loss():
    found = {}
    model.eval()
    for split in ("train", "val"):
        found[split] = sum(model(*get_batch(split)).item() for _ in range(eval_iters)) / eval_iters
    model.train()
    return found


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    return learning_rate * (0.1 + 0.45 * (1.0 + math.cos(math.pi * (it - warmup_iters) / (max_iters - warmup_iters))))


model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=15)
state = {"iter_num": 0, "tokens": 0, "best_val_loss": 1e9}
state["ema"] = {name: p.detach().clone() for name, p in model.named_parameters()}
run.prepare(model, optimizer, scaler, state)

for update in run.updates(lambda: get_batch("train"), shards=gradient_accumulation_steps, max_steps=max_iters):
    iter_num = state["iter_num"]
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    for X, Y in update:
        loss = model(X, Y)
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            state["ema"][name].lerp_(p, 0.05)
    state["tokens"] += gradient_accumulation_steps * batch_size * block_size
    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: norm {norm:.6f}, lr {lr:.2e}, tokens {state['tokens']}", flush=True)
    if (iter_num + 1) % eval_interval == 0:
        losses = estimate_loss()
        if master_process:
            print(f"step {iter_num}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}", flush=True)
        if losses["val"] < state["best_val_loss"]:
            state["best_val_loss"] = losses["val"]
            if master_process:
                torch.save({"model": model.state_dict(), "state": state}, out + ".best")
    state["iter_num"] += 1
    time.sleep(pace)
if master_process:
    torch.save({"model": model.state_dict(), "state": state, "scale": scaler.get_scale()}, out)
    print(f"saved after {state['iter_num']} iterations", flush=True)
