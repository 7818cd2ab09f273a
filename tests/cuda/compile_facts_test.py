#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""compile_facts.py sees what it is there to see."""
import unittest

import compile_facts

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_90a'
ptxas info    : Function properties for _Z5innerPf
    8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Function properties for _Z1fPf
    16 bytes stack frame, 12 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes cumulative stack size, 16388 bytes smem
ptxas info    : Compile time = 4.078 ms
ptxas info    : Compiling entry function '_Z1fPf' for 'sm_120a'
ptxas info    : Function properties for _Z1fPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers
"""


def facts(registers=40, stack=0, spills=0, shared=0):
    return {'registers': registers, 'stack': stack, 'spills': spills, 'shared': shared}


class CompileFactsTest(unittest.TestCase):
    row = ('a.cu', 'f', 'sm_90a')

    def differences(self, now, then):
        return list(compile_facts.differences({self.row: now}, {self.row: then}))

    def test_reads_each_architecture_of_a_report(self):
        self.assertEqual(compile_facts.facts_of(REPORT), {
            ('_Z1fPf', 'sm_90a'): facts(40, 16, 16, 16388),
            ('_Z1fPf', 'sm_120a'): facts(14)})

    def test_names_kernels_without_parameters(self):
        self.assertEqual(compile_facts.readable(['_ZN7isthmus7kernels1fILi2EEEvPf']), ['f<2>'])
        self.assertEqual(compile_facts.readable([]), [])

    def test_finds_spills_and_too_much_shared_memory(self):
        self.assertEqual(list(compile_facts.limits_broken({self.row: facts()})), [])
        self.assertEqual(len(list(compile_facts.limits_broken({self.row: facts(spills=4)}))), 1)
        self.assertEqual(
            len(list(compile_facts.limits_broken({self.row: facts(shared=101377)}))), 1)

    def test_compares_with_the_record(self):
        self.assertEqual(self.differences(facts(48), facts(40)), [])
        self.assertEqual(len(self.differences(facts(49), facts(40))), 1)
        self.assertEqual(len(self.differences(facts(stack=8), facts())), 1)
        self.assertEqual(len(self.differences(facts(shared=8), facts())), 1)

    def test_finds_kernels_added_and_lost(self):
        both = {self.row: facts(), ('a.cu', 'f', 'sm_120a'): facts()}
        self.assertEqual(list(compile_facts.differences(both, {})),
                         ['a.cu: f on sm_120a and sm_90a is not recorded'])
        self.assertEqual(len(list(compile_facts.differences({}, both))), 1)


if __name__ == '__main__':
    unittest.main()
