"""Clients that people use, unchanged, each in its own environment."""

import json
import pathlib
import subprocess
import sys
import zipfile

import httpx

HERE = pathlib.Path(__file__).parent
CPU_TORCH = "torch==2.13.0"  # guidellm and lm-eval would bring one of several gigabytes
VLLM = "vllm==0.33.0"


def test_litellm(install, run, server_url):
    commands = install("litellm", "litellm")
    assert "litellm is served" in run(commands / "python", HERE / "litellm_client.py", server_url)


def test_langchain(install, run, server_url):
    commands = install("langchain", "langchain-openai")
    assert "langchain is served" in run(
        commands / "python", HERE / "langchain_client.py", server_url
    )


def test_lm_eval(install, run, server_url, tmp_path):
    commands = install("lm-eval", CPU_TORCH, "lm-eval[api]")
    arguments = f"model=tiny,base_url={server_url}/v1/completions,num_concurrent=4,max_retries=1"
    run(
        commands / "lm_eval", "run",
        "--model", "local-completions",
        "--model_args", f"{arguments},tokenizer_backend=remote,tokenized_requests=True",
        "--include_path", HERE / "tasks",
        "--tasks", "local_choice,local_words",
        "--output_path", tmp_path / "results.json",
        cwd=HERE / "tasks",
    )  # fmt: skip
    [found] = tmp_path.glob("results*.json")
    results = json.loads(found.read_text())["results"]
    assert 0 <= results["local_choice"]["acc,none"] <= 1
    assert results["local_words"]["exact_match,none"] == 0


def test_guidellm(install, run, server_url, tmp_path):
    commands = install("guidellm", CPU_TORCH, "guidellm")
    tokenizer = httpx.get(f"{server_url}/v1/models").json()["data"][0]["root"]
    run(
        commands / "guidellm", "run",
        "--backend", f"kind=openai_http,target={server_url},model=tiny",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
        "--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=8",
        "--output", f"kind=json,path={tmp_path / 'report.json'}",
        "--disable-progress",
    )  # fmt: skip
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == 6 and not requests["errored"]
    assert all(request["output_tokens"] == 8 for request in requests["successful"])


def test_vllm_bench(environments, run, server_url, tmp_path):
    """vLLM's benchmark in its compiled form: one program out of the wheel, nothing installed."""
    folder = environments / "vllm"
    program = folder / "vllm" / "vllm-rs"
    if not program.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", tmp_path, VLLM], check=True)
        [wheel] = tmp_path.glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract("vllm/vllm-rs", folder)
        program.chmod(0o755)
    models = httpx.get(f"{server_url}/v1/models").json()["data"]
    for backend in ("openai", "openai-chat"):
        result = tmp_path / f"{backend}.json"
        run(
            program, "bench", "serve",
            "--backend", backend,
            "--base-url", server_url,
            "--model", "tiny",
            "--tokenizer", models[0]["root"],
            "--random-input-len", "48",
            "--random-output-len", "8",
            "--num-prompts", "6",
            "--max-concurrency", "2",
            "--ignore-eos",
            "--save-result",
            "--result-filename", result,
        )  # fmt: skip
        report = json.loads(result.read_text())
        assert (report["completed"], report["failed"]) == (6, 0)
        assert report["total_output_tokens"] == 6 * 8
