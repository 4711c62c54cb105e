// The compiled part of core, bound to Python by nanobind. What it offers is in _native.pyi.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_hashing(nb::module_ &module);
void bind_tables(nb::module_ &module);
void bind_token_ids(nb::module_ &module);

NB_MODULE(_native, module) {
    nb::set_leak_warnings(false);  // a table may live as long as the interpreter
    bind_hashing(module);
    bind_tables(module);
    bind_token_ids(module);
}
