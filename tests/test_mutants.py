"""The faults that `make mutants` plants still fit the code, and every file has one."""

from mutants import faults, misfits


def test_every_fault_fits_the_code_in_one_place_and_every_file_has_one():
    assert misfits() == []
    assert len(faults()) >= 150
