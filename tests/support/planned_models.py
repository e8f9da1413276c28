"""Tiny models of other libraries, unchanged, which plans cut over ranks; and the same training in one process."""

from __future__ import annotations

from typing import Any

import torch

WORDS, LENGTH, ROWS, STEPS = 37, 8, 2, 2  # an odd number of words: ranks have different shares of them


def made(kind: str, dropout: float = 0.0) -> torch.nn.Module:
    """The model `kind`, the same values every time."""
    torch.manual_seed(0)
    if kind == "vit":
        return vision_transformer(dropout)
    import transformers as hf

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
    if kind in ("llama", "qwen2"):
        name = "Llama" if kind == "llama" else "Qwen2"
        more = {"vocab_size": WORDS, "num_key_value_heads": 2 if kind == "llama" else 4, "attention_dropout": dropout}
        return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**sizes, **more))  # type: ignore[no-any-return]
    if kind == "gpt2":
        drops = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        small = hf.GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=4, **drops, **ends)
        return hf.GPT2LMHeadModel(small)
    if kind == "bert":
        drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), dropout)
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes, **drops))
    assert kind == "t5"
    ends = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=WORDS, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=dropout, **ends
        )
    )


def vision_transformer(dropout: float) -> torch.nn.Module:
    """torchvision's, or where it is not installed a network with its class name and the names of its modules."""
    try:
        from torchvision.models import VisionTransformer
    except (ImportError, RuntimeError):  # RuntimeError: made for another version of torch
        return StandIn(dropout)
    model: torch.nn.Module = VisionTransformer(8, 4, 2, 4, 16, 32, num_classes=5, dropout=dropout)
    torch.nn.init.normal_(model.heads.head.weight, std=0.1)  # type: ignore[union-attr]
    return model


class _Block(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)
        self.self_attention = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        layers = [torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 16)]
        self.mlp = torch.nn.Sequential(*layers, torch.nn.Dropout(dropout))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        normed = self.ln_1(rows)
        rows = rows + self.self_attention(normed, normed, normed, need_weights=False)[0]
        return rows + self.mlp(self.ln_2(rows))  # type: ignore[no-any-return]


class StandIn(torch.nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv_proj = torch.nn.Conv2d(3, 16, 4, 4)
        layers = torch.nn.Sequential(_Block(dropout), _Block(dropout))
        self.encoder = torch.nn.ModuleDict({"layers": layers})
        self.heads = torch.nn.Linear(16, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = self.encoder["layers"](self.conv_proj(images).flatten(2).transpose(1, 2))
        return self.heads(rows.mean(1))  # type: ignore[no-any-return]


StandIn.__name__ = "VisionTransformer"


def batch(kind: str, index: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(index)
    if kind == "vit":
        images, labels = torch.randn(ROWS, 3, 8, 8, generator=drawn), torch.randint(5, (ROWS,), generator=drawn)
        return {"x": images.to(device), "labels": labels.to(device)}
    ids = torch.randint(2, WORDS, (ROWS, LENGTH), generator=drawn)
    labels = ids.roll(1, 1)
    labels[0, :3] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def loss_of(model: Any, kind: str, index: int, device: str = "cpu") -> torch.Tensor:
    given = batch(kind, index, device)
    if kind == "vit":
        return torch.nn.functional.cross_entropy(model(given["x"]), given["labels"])
    found: torch.Tensor = model(**given).loss
    return found


def alone(kind: str, replicas: int = 1, clip: float = 0.0, steps: int = STEPS) -> dict[str, Any]:
    """Losses of the first replica, norms and the state after training in one process."""
    model = made(kind).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: dict[str, Any] = {}
    for step in range(steps):
        losses = [loss_of(model, kind, step + 10 * replica) for replica in range(replicas)]
        torch.stack(losses).mean().backward()
        found[f"loss.{step}"] = float(losses[0].detach())
        if clip:
            found[f"norm.{step}"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return {**found, **{f"state.{name}": value.detach() for name, value in model.state_dict().items()}}


def same(found: dict[str, Any], expected: dict[str, Any], case: str, tolerance: float = 1e-6) -> None:
    assert set(found) == set(expected), case
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{case}, {name}: {text}"
        )
