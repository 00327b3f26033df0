"""Step reports in the store: read as they were written, or a reason why not."""

from pathlib import Path

import pytest
from tests.core.ledgers import store_report

from headrace.core.reports import NoReportError, read_report, read_rows
from headrace.core.store import DigestMismatchError, store_folder
from headrace.core.store.files import FileStore
from headrace.schemas.state import StepReport
from headrace.schemas.weights import WeightsRef

REPORT = StepReport(model_id="m", incarnation="i", step=3, attempt="a", lane=1, groups=(), refused_unlisted=2, timings={"step": 0.5})


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


def test_a_report_is_read_as_it_was_written_and_rows_beside_it(store: FileStore, tmp_path: Path):
    ref = store_report(store, REPORT, tmp_path)
    assert read_report(store, ref) == REPORT
    assert read_rows(store, ref) is None
    kept = REPORT.model_copy(update={"step": 4, "rows": "all"})
    assert read_rows(store, store_report(store, kept, tmp_path, rows=b"tensors")) == b"tensors"


def test_what_was_never_kept_says_so(store: FileStore):
    with pytest.raises(NoReportError, match="no report was kept: the ledger names none"):
        read_report(store, None)
    with pytest.raises(NoReportError, match="no report was kept"):
        read_rows(store, None)


@pytest.mark.parametrize("gone", ["manifest.json", "report.json"])
def test_a_report_that_is_gone_is_told_from_one_that_was_never_kept(store: FileStore, tmp_path: Path, gone: str):
    ref = store_report(store, REPORT, tmp_path)
    store.delete(f"{store.resolve(ref.uri)}/{gone}")
    with pytest.raises(NoReportError, match=rf"the report at {ref.uri} is gone: it was deleted"):
        read_report(store, ref)


def test_a_report_that_was_changed_is_refused(store: FileStore, tmp_path: Path):
    ref = store_report(store, REPORT, tmp_path)
    path = Path(ref.uri.removeprefix("file://")) / "report.json"
    path.write_bytes(path.read_bytes().replace(b'"step":3', b'"step":4'))
    with pytest.raises(DigestMismatchError, match=r"report.json has SHA-256 .* it was changed"):
        read_report(store, ref)


def test_another_folder_is_no_report(store: FileStore, tmp_path: Path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "report.json").write_text("{}")
    of = {"model_id": "m", "incarnation": "i", "step": 1, "attempt": "a"}
    _, weights = store_folder(store, "w", tmp_path / "w", kind="weights", **of)
    with pytest.raises(NoReportError, match="holds weights, not a report"):
        read_report(store, weights)
    _, broken = store_folder(store, "r", tmp_path / "w", kind="report", **of)
    with pytest.raises(NoReportError, match=r"report.json can't be read: model_id: Field required"):
        read_report(store, broken)
    (tmp_path / "w" / "report.json").rename(tmp_path / "w" / "other.json")
    _, empty = store_folder(store, "s", tmp_path / "w", kind="report", **of)
    with pytest.raises(NoReportError, match=r"has no report.json: it is no report"):
        read_report(store, empty)


def test_a_report_of_another_store_is_refused(store: FileStore):
    with pytest.raises(Exception, match="is not in this object store"):
        read_report(store, WeightsRef(uri="s3://elsewhere/report", digest="0" * 64))
