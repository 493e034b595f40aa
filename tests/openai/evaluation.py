"""`lm_eval` of PyPI (EleutherAI's lm-evaluation-harness) against a gateway: a small task, whose log likelihoods must be those of transformers.
Prints one line per point; exit status 1 if one fails.

    python evaluation.py http://127.0.0.1:8080/v1 MODEL_FOLDER FOLDER
    python evaluation.py --golden MODEL_FOLDER          writes evaluation.json with transformers and torch, and needs no lm_eval

The task is written to FOLDER; nothing is downloaded. `evaluation.json` was made by transformers 5.24.0 with torch 2.7.1 in float32.
"""
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
GOLDEN = os.path.join(HERE, "evaluation.json")
DOCUMENTS = [
    {"context": "Once upon a time", "choices": [" there was a fox", " the sea was red", " a hare"]},
    {"context": "The fox said to the hare:", "choices": [" come with me", " xyzzy 42"]},
    {"context": "It was a cold day by the sea, and", "choices": [" the fox was tired.", " café 🦊"]},
]
TOLERANCE = 2e-3


def golden(folder):
    """What transformers finds for each choice: its log likelihood, and whether it is what greedy decoding would write."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = []
    for document in DOCUMENTS:
        context = tokenizer.encode(document["context"], add_special_tokens=False)
        for choice in document["choices"]:
            whole = tokenizer.encode(document["context"] + choice, add_special_tokens=False)
            with torch.no_grad():
                logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
            pairs = [(logits[at - 1], whole[at]) for at in range(len(context), len(whole))]
            found.append([round(sum(row[token].item() for row, token in pairs), 5), all(row.argmax().item() == token for row, token in pairs)])
    with open(GOLDEN, "w") as f:
        json.dump(found, f)
        f.write("\n")


def evaluated(base, model, folder, batch_size):
    """What `lm_eval` finds over the gateway."""
    # Before the packages read it.
    os.environ.update(HF_HOME=os.path.join(folder, "hf"), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "documents.jsonl"), "w") as f:
        f.writelines(json.dumps({**document, "answer": 0}) + "\n" for document in DOCUMENTS)
    task = {
        "task": "sepal_foxes", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": os.path.join(folder, "documents.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "choices",
        "doc_to_target": "answer", "target_delimiter": "", "metric_list": [{"metric": "acc"}],
    }
    with open(os.path.join(folder, "sepal_foxes.yaml"), "w") as f:
        json.dump(task, f)  # JSON is YAML
    arguments = dict(base_url=f"{base}/completions", model="demo", tokenizer=model, tokenizer_backend="huggingface", num_concurrent=2, max_retries=1)
    results = lm_eval.simple_evaluate(model="local-completions", model_args=arguments, tasks=["sepal_foxes"], batch_size=batch_size,
                                      task_manager=TaskManager(include_path=folder, include_defaults=False), log_samples=True, bootstrap_iters=0)
    samples = sorted(results["samples"]["sepal_foxes"], key=lambda sample: sample["doc_id"])
    return [[float(one[0]), str(one[1]) == "True"] for sample in samples for one in sample["filtered_resps"]]


def main():
    if sys.argv[1] == "--golden":
        return golden(sys.argv[2])
    import points

    base, model, folder = sys.argv[1:4]
    point = points.of("lm_eval")
    with open(GOLDEN) as f:
        expected = json.load(f)

    def agree(batch_size):
        found = evaluated(base, model, folder, batch_size)
        assert len(found) == len(expected), (found, expected)
        for (likelihood, is_greedy), (wanted, wanted_greedy) in zip(found, expected):
            assert abs(likelihood - wanted) <= TOLERANCE * max(1, abs(wanted)) and is_greedy == wanted_greedy, (found, expected)

    point("one_by_one")(lambda: agree(1))
    point("several_in_a_request")(lambda: agree(4))
    sys.exit(points.failed > 0)


main()
