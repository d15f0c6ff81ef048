"""A whole training in a second: its folder, its log, its model, and what stops it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gerund.errors import ConfigError, GerundError, OutputExistsError, ResourceError
from gerund.training.objectives.language_modelling import CausalLosses
from gerund.training.processes import has_bf16
from gerund.training.step import TrainingModule
from tests.training.outcomes import losses, read_log


class TestWhole:
    @pytest.mark.slow
    def test_folder_log_and_model(self, whole):
        model_folder = whole / "model"
        assert sorted(path.name for path in model_folder.iterdir()) == [
            "README.md",
            "config.json",
            "config_sentence_transformers.json",
            "generation_config.json",
            "gerund.json",
            "model.safetensors",
            "modules.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "training.json",
        ]
        assert len({path.stat().st_mode for path in model_folder.iterdir()}) == 1
        report = json.loads((model_folder / "training.json").read_text("utf-8"))
        assert report["tokens"] == 12 * 128
        assert set(report["validation_loss"]) == {"a"}
        assert set(report["epochs"]) == {"a", "b"}
        assert "folder" not in report["recipe"]["data"]
        assert "output" not in report["recipe"]

        model, tokenizer = (k.from_pretrained(str(model_folder)) for k in (AutoModelForCausalLM, AutoTokenizer))
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == len(tokenizer)
        assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (0, 1, 2)
        assert model.generation_config.eos_token_id == 1
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        trained = load_file(whole / "checkpoints/checkpoint-12/trainable.safetensors")
        for name, parameter in model.named_parameters():
            assert torch.equal(trained[f"model.{name}"].bfloat16(), parameter)

        rows = read_log(whole)
        assert [row["step"] for row in rows] == [2, 4, 6, 6, 8, 10, 12, 12]
        first = {"step", "loss", "learning_rate", "tokens_per_second", "tokens", "seconds", "peak_memory_mib"}
        assert first <= rows[0].keys()
        assert rows[0]["tokens"] == 256
        assert rows[-1]["val_a"] < 5.7 < rows[0]["loss"]

        rates = [row["learning_rate"] for row in rows if "loss" in row]
        assert rates[1:4] == pytest.approx([0.01, 0.01, 0.01])
        assert rates[-1] == pytest.approx(0.01 * (1 - (3 / 4) ** 0.5))

    @pytest.mark.slow
    def test_long_blocks_in_the_decay(self, run, whole, tmp_path, monkeypatch):
        shapes = []
        original = TrainingModule.forward

        def forward(self, name, part, **kwargs):
            if self.training:
                shapes.append(tuple(part["input_ids"].shape))
            return original(self, name, part, **kwargs)

        monkeypatch.setattr(TrainingModule, "forward", forward)
        run("long", "objectives.causal.decay_length=32")
        assert shapes == [(4, 16)] * 16 + [(4, 32)] * 4
        assert losses(tmp_path / "long")[:4] == losses(whole)[:4]

    @pytest.mark.slow
    def test_finished_output_is_not_overwritten(self, run, whole, tmp_path):
        shutil.copytree(whole, tmp_path / "out")
        for resume in (False, True):
            with pytest.raises(OutputExistsError, match="model is there already"):
                run("out", resume=resume)
        (tmp_path / "file").write_text("x")
        with pytest.raises(OutputExistsError, match="is a file"):
            run("file")
        before = sorted((tmp_path / "out" / "model").iterdir())
        with pytest.raises(OutputExistsError, match="is a model's own folder"):
            run("out/model")
        assert sorted((tmp_path / "out" / "model").iterdir()) == before

    @pytest.mark.slow
    def test_a_loss_that_is_no_number_stops_with_its_batch_saved(self, run, tmp_path, monkeypatch):
        original = CausalLosses.__call__
        calls = []

        def forward(self, model, batch):
            calls.append(batch)
            factor = float("nan") if len(calls) == 5 else 1.0
            return {name: value * factor for name, value in original(self, model, batch).items()}

        monkeypatch.setattr(CausalLosses, "__call__", forward)
        with pytest.raises(GerundError, match=r"the loss of step 3 is no finite number \(causal nan\); its batch"):
            run("out")
        saved = load_file(tmp_path / "out" / "failed-step-3.safetensors")
        assert saved["causal.input_ids"].shape == (8, 16)
        assert torch.equal(saved["causal.input_ids"][:4], calls[4]["input_ids"])

    @pytest.mark.slow
    def test_a_gradient_that_is_no_number_stops_before_it_spoils_the_weights(self, run, monkeypatch):
        original = CausalLosses.__call__

        def forward(self, model, batch):
            [total] = original(self, model, batch).values()
            # The root of 0 is 0, and its slope is infinite.
            return {"causal": total + (total * 0).sqrt()}

        monkeypatch.setattr(CausalLosses, "__call__", forward)
        with pytest.raises(GerundError, match=r"the gradient of step 1 is no finite number"):
            run("out")

    @pytest.mark.slow
    def test_exhausted_memory(self, run, monkeypatch):
        def save(*_):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

        monkeypatch.setattr("gerund.training.trainer.save_file", save)
        with pytest.raises(ResourceError, match="memory ran out; set a smaller micro_batch_size"):
            run("out")


class TestModel:
    @pytest.mark.slow
    def test_mistakes_in_the_architecture(self, run):
        with pytest.raises(ConfigError, match=r"unknown field of model.config 'hiden_size'; valid are: .*hidden_size"):
            run("out", "model.config.hiden_size=3")
        with pytest.raises(ConfigError, match="'lama' is unknown to transformers"):
            run("out", "model.config.model_type=lama")
        with pytest.raises(ConfigError, match="has no model_type"):
            run("out", "model.config={hidden_size: 8}")
        with pytest.raises(ConfigError, match="makes no model: "):
            run("out", "model.config.hidden_size=many")
        run("out", "steps=6")  # a refused recipe leaves nothing in the way

    def test_other_machines(self, run, monkeypatch):
        monkeypatch.setattr("shutil.which", lambda _: None)
        with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
            run("out", "compile=true")

    @pytest.mark.slow
    def test_an_existing_tokenizer_is_used(self, run, tokenizer, tmp_path):
        tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
        folder = run("out", f"tokenizer={{path: {tmp_path / 'tokenizer'}}}", "steps=6")
        again = AutoTokenizer.from_pretrained(str(folder))
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()

    @pytest.mark.slow
    def test_bf16_and_adamw_train_too(self, run, tmp_path, capsys):
        run("out", "precision=bf16", "optimizer.name=adamw", "schedule={name: cosine}")
        assert ("is emulated" in capsys.readouterr().err) == (not has_bf16())
        assert losses(tmp_path / "out")[-1][2] < 5.7
        weights = load_file(tmp_path / "out/checkpoints/checkpoint-12/trainable.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
