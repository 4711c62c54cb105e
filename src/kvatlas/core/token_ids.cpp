// A MessagePack list of token ids as uint32, see _native.pyi.
//
// An engine's events carry 256 ids per block: as Python integers they cost five times what the
// hash over them does.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <limits>

#include "view.h"

namespace nb = nanobind;

namespace {

class Reader {
  public:
    explicit Reader(const View &view) : at_(view.data()), end_(at_ + view.size()) {}
    size_t left() const { return static_cast<size_t>(end_ - at_); }

    // An unsigned number of so many bytes, big endian.
    uint64_t number(size_t bytes) {
        if (left() < bytes) throw nb::value_error("the list ends too early");
        uint64_t value = 0;
        while (bytes--) value = value << 8 | *at_++;
        return value;
    }

    size_t length() {
        const uint64_t first = number(1);
        if (first >> 4 == 0x9) return first & 0xf;
        if (first == 0xdc) return number(2);
        if (first == 0xdd) return number(4);
        throw nb::value_error("no list");
    }

    uint32_t id() {
        if (left() >= 5) {  // three ids of four are of one of these two forms
            uint32_t word;
            if (*at_ == 0xce) {
                std::memcpy(&word, at_ + 1, 4);
                at_ += 5;
                return __builtin_bswap32(word);
            }
            if (*at_ == 0xcd) {
                std::memcpy(&word, at_ + 1, 4);
                at_ += 3;
                return __builtin_bswap32(word) >> 16;
            }
        }
        const uint64_t first = number(1);
        if (first < 0x80) return static_cast<uint32_t>(first);
        if (first < 0xcc || first > 0xd3) throw nb::value_error("a token id is a whole number");
        const size_t bytes = size_t{1} << (first & 3);
        const uint64_t value = number(bytes);
        const bool negative = first >= 0xd0 && value >> (8 * bytes - 1);
        if (negative || value > std::numeric_limits<uint32_t>::max())
            throw nb::value_error("a token id is from 0 to 2**32 - 1");
        return static_cast<uint32_t>(value);
    }

  private:
    const uint8_t *at_, *end_;
};

nb::bytes token_ids(nb::handle list) {
    const View view(list);
    Reader reader(view);
    const size_t count = reader.length();
    if (count > reader.left()) throw nb::value_error("the list ends too early");
    nb::object ids = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(4 * count)));
    if (!ids) throw nb::python_error();
    auto *to = reinterpret_cast<uint8_t *>(PyBytes_AS_STRING(ids.ptr()));
    for (size_t i = 0; i < count; i++, to += 4) {
        const uint32_t id = reader.id();
        for (int byte = 0; byte < 4; byte++) to[byte] = static_cast<uint8_t>(id >> 8 * byte);
    }
    if (reader.left()) throw nb::value_error("something follows the list");
    return nb::borrow<nb::bytes>(ids);
}

}  // namespace

void bind_token_ids(nb::module_ &module) { module.def("token_ids", token_ids); }
