"""Map-style Hugging Face data sets, as they are. They too have a method `batch`, with other
arguments, so nothing may be concluded from that name."""

import datasets

from gradsync.data.loader import loader
from gradsync.world import World


def test_hugging_face_data_sets_are_read_as_they_are() -> None:
    columns = {"number": list(range(10)), "text": list("abcdefghij")}
    data = datasets.Dataset.from_dict(columns).with_format("torch")
    one = loader(data, World(), global_batch_size=4, micro_batch_size=2, num_epochs=1)
    batches = [leaf.batch for step in one for leaf in step]
    numbers = [n for batch in batches for n in batch["number"].tolist()]
    assert sorted(numbers) == list(range(10))
    texts = [text for batch in batches for text in batch["text"]]
    assert texts == ["abcdefghij"[n] for n in numbers]
    assert one.state_dict()["dataset"] == f"Dataset:10:{data._fingerprint}"


def test_a_name_given_by_the_user_comes_first() -> None:
    data = datasets.Dataset.from_dict({"number": [1, 2]})
    data.fingerprint = "mine"
    one = loader(data, World(), global_batch_size=1, micro_batch_size=1)
    assert one.state_dict()["dataset"] == "Dataset:2:mine"
