"""Tiny models of other libraries, unchanged, which plans cut over ranks; and the same training in one process."""

from __future__ import annotations

from typing import Any

import torch

WORDS, LENGTH, ROWS, STEPS = 37, 8, 2, 2  # an odd number of words: ranks have different shares of them


def made(kind: str, dropout: float = 0.0) -> torch.nn.Module:
    """The model `kind`, the same values every time."""
    torch.manual_seed(0)
    if kind == "vit":
        from torchvision.models import VisionTransformer

        model: torch.nn.Module = VisionTransformer(8, 4, 2, 4, 16, 32, num_classes=5, dropout=dropout)
        torch.nn.init.normal_(model.heads.head.weight, std=0.1)  # type: ignore[union-attr]
        return model
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
