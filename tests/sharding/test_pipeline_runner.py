"""The engine over a pipeline: the same answers as over one device, and refused partitions."""

import jax
import pytest
from tiny_pipeline import LEGAL, tiny_config

from dsv41_jax.checkpoint import load_params, reader
from dsv41_jax.checkpoint.tiny_tokenizer import tiny_tokenizer
from dsv41_jax.engram_table import EngramTables
from serving.config import parse_options
from serving.detokenizer import vocabulary
from serving.engine import Engine
from serving.pipeline_runner import PipelineRunner
from serving.request import Request, SamplingParams
from serving.runner import Runner
from serving.startup import StartupError, start
from sharding.cache_sizes import CacheSizes
from sharding.limits import engine_limits

TOKENS = 24


def answers(runner, token_ids, microbatches=1):
    """Tokens and log-probabilities of requests that come and go at different steps."""
    engine = Engine(runner, vocabulary(tiny_tokenizer()), microbatches=microbatches)
    for index, (length, new) in enumerate([(5, 6), (30, 3), (1, 8), (17, 2)]):
        sampling = SamplingParams(
            max_tokens=new,
            temperature=float(index % 2),
            seed=index,
            logprobs=2,
            prompt_logprobs=1 if index == 1 else None,
            ignore_eos=True,
        )
        prompt = tuple(token_ids[index : index + length].tolist())
        engine.add_request(
            Request(
                request_id=str(index), prompt_token_ids=prompt, sampling=sampling, arrival_time=0.0
            )
        )
    found = {}
    while engine.has_work:
        for output in engine.step():
            mine = found.setdefault(output.request_id, [[], []])
            mine[0].extend(output.token_ids)
            mine[1].extend([*(output.logprobs or ()), *(output.prompt_logprobs or ())])
    return found


def test_requests_get_the_answers_of_one_device(pipeline_of, tiny, token_ids):
    config = tiny_config()
    limits = engine_limits(config, max_model_len=48, max_num_seqs=3, max_num_batched_tokens=TOKENS)
    sizes = dict(
        limits=limits,
        cache_sizes=CacheSizes(window_pages=9, global_pages=9, slots=3),
        token_buckets=(32,),
    )
    params = load_params(tiny, config, progress=False)
    alone = Runner(config, params, EngramTables.open(tiny, config), **sizes)
    staged = PipelineRunner(pipeline_of(LEGAL), **sizes)
    for runner in (alone, staged):
        runner.compile_all()
    expected = answers(alone, token_ids)
    for microbatches in (1, 3):
        assert answers(staged, token_ids, microbatches) == expected


def test_steps_compile_nothing_once_the_runner_is_ready(pipeline_of, token_ids):
    limits = engine_limits(
        tiny_config(), max_model_len=48, max_num_seqs=3, max_num_batched_tokens=TOKENS
    )
    sizes = CacheSizes(window_pages=9, global_pages=9, slots=3)
    pipeline = pipeline_of(LEGAL)
    runner = PipelineRunner(pipeline, limits=limits, cache_sizes=sizes, token_buckets=(32,))
    runner.compile_all()
    before = [stage.program._cache_size() for stage in pipeline.stages]
    answers(runner, token_ids)
    assert [stage.program._cache_size() for stage in pipeline.stages] == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipeline-stages", "2,4"], r"kv of layer 1 \(stage 0\) is read by layer 2 \(stage 1\)"),
        (["--pipeline-parallel-size", "5"], "no partition into 5 stages is legal"),
        (["--tensor-parallel-size", "3"], r"attn.wq_b.weight .* do not divide"),
        (["--pipeline-stages", "1,5", "--tensor-parallel-size", "16"], "do not divide"),
    ],
)
def test_a_refused_partition_stops_the_start_before_weights(tiny, monkeypatch, arguments, message):
    def refuse(*args, **kwargs):
        raise AssertionError("a weight file was opened")

    monkeypatch.setattr(reader.Checkpoint, "open", refuse)
    options = parse_options(["--model", str(tiny), *arguments])
    with pytest.raises(StartupError, match=message):
        start(options.model, options.engine, lambda line: None)


def test_contradicting_options_are_wrong_usage(tiny, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_options(
            ["--model", str(tiny), "--pipeline-parallel-size", "3", "--pipeline-stages", "1,5"]
        )
    assert ended.value.code == 2
    assert "contradicts" in capsys.readouterr().err


def test_the_server_starts_on_stages(tiny):
    arguments = ["--pipeline-stages", "1,2,3", "--max-model-len", "48", "--max-num-seqs", "3"]
    arguments += ["--max-num-batched-tokens", str(TOKENS), "--pipeline-microbatches", "2"]
    options = parse_options(["--model", str(tiny), *arguments])
    said = []
    serving = start(options.model, options.engine, said.append)
    serving.engine.shutdown()
    assert "partition: stages of 1,2,3 layers, 1 devices each, 2 microbatches" in said
    assert len(jax.devices()) >= 3
