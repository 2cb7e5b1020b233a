"""The files of examples/, which help and README name."""

import pytest
import torch

from cs336.config import Phase
from cs336.record import read_record
from tests.own_kernels import right


@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_attention_is_attention(is_causal: bool) -> None:
    from examples import flex_attention  # which imports the compiler

    q, k, v = torch.randn(3, 2, 256, 16, generator=torch.Generator().manual_seed(0))
    with torch.compiler.set_stance("force_eager"):
        found = flex_attention.attention(q, k, v, is_causal)
    torch.testing.assert_close(found, right(q, k, v, is_causal), rtol=1e-5, atol=1e-5)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        tokens = torch.arange(8) + index
        return {"input_ids": tokens, "labels": tokens}


def tiny_gpt2():
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64)
    )


def step_of(directory):
    (path,) = (directory / "e2e_benchmark/mine/runs").glob("*.json")
    record = read_record(path)
    phases = {each.phase: each.mean_s for each in record.measurements}
    parts = [time for phase, time in phases.items() if phase is not Phase.STEP]
    assert sum(parts) == pytest.approx(phases[Phase.STEP], rel=1e-6)
    assert min(phases[phase] for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)) > 0
    return record


def test_a_trainer_of_hugging_face_is_watched(tmp_path):
    model = tiny_gpt2()
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from examples.watch_trainer import Watched

    arguments = transformers.TrainingArguments(
        tmp_path / "out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=6,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    watched = Watched(warmup_steps=2, output=tmp_path)
    transformers.Trainer(
        model=model, args=arguments, train_dataset=Tokens(), callbacks=[watched]
    ).train()
    loop = step_of(tmp_path).loop
    assert (loop.measured_steps, loop.batch_size, loop.context_length) == (4, 4, 8)


def test_a_trainer_of_lightning_is_watched(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from examples.watch_lightning import Watched

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = tiny_gpt2()

        def training_step(self, batch, _):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    watched = Watched("model", warmup_steps=2, output=tmp_path)
    trainer = lightning.Trainer(
        max_steps=6,
        accelerator="cpu",
        callbacks=[watched],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Tokens(), batch_size=2))
    loop = step_of(tmp_path).loop
    assert (loop.measured_steps, loop.batch_size, loop.context_length) == (4, 2, 8)


def test_the_loop_of_the_example_is_watched(tmp_path, monkeypatch):
    from examples import loop

    monkeypatch.setattr(loop, "SHAPES", dict.fromkeys(loop.SHAPES, (16, 8, 64, 1)))
    loop.train(steps=4, warmup_steps=1, output=tmp_path)
    (path,) = (tmp_path / "e2e_benchmark/loop/runs").glob("*.json")
    record = read_record(path)
    assert (record.loop.batch_size, record.loop.context_length) == (16, 8)
    attention, feed_forward, norms = 4 * (64 * 64 + 64), 2 * 4 * 64 * 64 + 5 * 64, 2 * 2 * 64
    assert record.num_parameters == attention + feed_forward + norms + 10_000 * (64 + 65)


MEANS = {"watch/step_ms", "watch/forward_ms", "watch/backward_ms", "watch/tokens_per_s"}


def check_series(series):
    """Of 30 steps, the means of 10 stand at each tenth one, and all are above 0."""
    assert series.keys() >= MEANS
    for name in MEANS:
        steps, values = zip(*series[name], strict=True)
        assert steps == (9, 19, 29)
        assert min(values) > 0


def test_weights_and_biases_has_the_means(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from examples import watch_wandb

    logged = []
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    log = wandb.Run.log

    def kept(run, data, step=None, **others):
        logged.append((step, data))
        log(run, data, step=step, **others)

    monkeypatch.setattr(wandb.Run, "log", kept)
    watch_wandb.train(steps=30, every=10, output=tmp_path)
    names = {name for _, data in logged for name in data}
    check_series({name: [(step, data[name]) for step, data in logged] for name in names & MEANS})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow_has_the_means(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    from examples import watch_mlflow

    # without a database, of which mlflow-skinny has none
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlflow").as_uri())
    mlflow.set_experiment("watched")
    watch_mlflow.train(steps=30, every=10, output=tmp_path)
    (run,) = mlflow.search_runs(output_format="list")
    client = mlflow.MlflowClient()
    series = {}
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        series[name] = [(point.step, point.value) for point in history]
    check_series(series)


def test_tensorboard_has_the_means(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from examples import watch_tensorboard

    watch_tensorboard.train(steps=30, every=10, logs=str(tmp_path / "runs"), output=tmp_path)
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    check_series(
        {
            name: [(point.step, point.value) for point in events.Scalars(name)]
            for name in events.Tags()["scalars"]
        }
    )
