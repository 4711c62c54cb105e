// Copies of state that sum what they copy in the same pass, see _copies.pyi.
//
// A block leaves the processor's cache before it is whole: who copies first and sums then reads
// memory twice. Here each 64 bytes are loaded once, stored, and summed while they are in registers,
// so the sum is of what was stored, whatever becomes of the source meanwhile. Stores go past the
// cache where they can: nobody reads the copy soon, and its lines need not be fetched to be written.
//
// What a socket brings the kernel has copied already: it is received a little at a time, and summed
// while that is in the cache.
//
// The sum is XXH3, 128 bits (xxHash's doc/xxhash_spec.md), of more than 240 bytes: what is shorter
// goes to the library.

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <tuple>
#include <vector>

#include "../core/view.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nb = nanobind;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "sums are of little-endian words");

namespace {

constexpr size_t STRIPE = 64, BLOCK = 16;  // bytes; stripes between scrambles
constexpr size_t SHORT = 240;              // bytes that are summed in another way

constexpr uint32_t P32_1 = 0x9e3779b1, P32_2 = 0x85ebca77, P32_3 = 0xc2b2ae3d;
constexpr uint64_t P64_1 = 0x9e3779b185ebca87, P64_2 = 0xc2b2ae3d27d4eb4f,
                   P64_3 = 0x165667b19e3779f9, P64_4 = 0x85ebca77c2b2ae63,
                   P64_5 = 0x27d4eb2f165667c5;

// XXH3's own constant: numbers without a pattern.
alignas(64) const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

const uint8_t *const SCRAMBLE = SECRET + sizeof SECRET - STRIPE;

using Two = uint64_t __attribute__((vector_size(16)));
constexpr size_t TWOS = STRIPE / sizeof(Two);

struct Sum {
    alignas(32) Two lanes[TWOS] = {{P32_3, P64_1}, {P64_2, P64_3}, {P64_4, P32_2}, {P64_5, P32_1}};
    size_t stripes = 0;  // taken in
};

constexpr size_t AHEAD = 512;  // bytes that are asked for before they are needed

inline Two two(const uint8_t *at) {
    Two value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline Two added(Two lanes, Two value, const uint8_t *secret) {
    const Two keyed = value ^ two(secret);
    return lanes + Two{value[1], value[0]} + (keyed & 0xffffffff) * (keyed >> 32);
}

// Copies whole stripes, and takes them in.
using Move = void (*)(Sum &, uint8_t *to, const uint8_t *from, size_t stripes);

void move_plain(Sum &sum, uint8_t *to, const uint8_t *from, size_t stripes) {
    Two lanes[TWOS];
    std::memcpy(lanes, sum.lanes, sizeof lanes);
    size_t at = sum.stripes % BLOCK;
    sum.stripes += stripes;
    for (; stripes; stripes--, to += STRIPE, from += STRIPE) {
        __builtin_prefetch(from + AHEAD);
#pragma GCC unroll 4
        for (size_t i = 0; i < TWOS; i++) {
            const Two value = two(from + 16 * i);
            std::memcpy(to + 16 * i, &value, sizeof value);
            lanes[i] = added(lanes[i], value, SECRET + 8 * at + 16 * i);
        }
        if (++at < BLOCK) continue;
        at = 0;
#pragma GCC unroll 4
        for (size_t i = 0; i < TWOS; i++)
            lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ two(SCRAMBLE + 16 * i)) * uint64_t{P32_1};
    }
    std::memcpy(sum.lanes, lanes, sizeof lanes);
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) inline __m256i added(__m256i lanes, __m256i value,
                                                     const uint8_t *secret) {
    const __m256i keyed =
        _mm256_xor_si256(value, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(secret)));
    const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(_mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32)),
                            _mm256_add_epi64(lanes, swapped));
}

__attribute__((target("avx2"))) inline __m256i scrambled(__m256i lanes, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi32(static_cast<int>(P32_1));
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes =
        _mm256_xor_si256(lanes, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(secret)));
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

enum class Store { NOT, NEAR, PAST };  // it is there already; in the cache; past it

template <Store store>
__attribute__((target("avx2"))) void move_wide(Sum &sum, uint8_t *to, const uint8_t *from,
                                               size_t stripes) {
    __m256i *lanes = reinterpret_cast<__m256i *>(sum.lanes);
    __m256i low = lanes[0], high = lanes[1];
    size_t at = sum.stripes % BLOCK;
    sum.stripes += stripes;
    while (stripes) {
        const size_t run = std::min(stripes, BLOCK - at);
        const uint8_t *secret = SECRET + 8 * at;
#pragma GCC unroll 4
        for (size_t i = 0; i < run; i++, to += STRIPE, from += STRIPE, secret += 8) {
            _mm_prefetch(reinterpret_cast<const char *>(from) + AHEAD, _MM_HINT_T0);
            const __m256i *source = reinterpret_cast<const __m256i *>(from);
            const __m256i one = _mm256_loadu_si256(source), two = _mm256_loadu_si256(source + 1);
            __m256i *target = reinterpret_cast<__m256i *>(to);
            if (store == Store::PAST) {
                _mm256_stream_si256(target, one);
                _mm256_stream_si256(target + 1, two);
            } else if (store == Store::NEAR) {
                _mm256_storeu_si256(target, one);
                _mm256_storeu_si256(target + 1, two);
            }
            low = added(low, one, secret);
            high = added(high, two, secret + 32);
        }
        stripes -= run;
        at += run;
        if (at == BLOCK) {
            low = scrambled(low, SCRAMBLE);
            high = scrambled(high, SCRAMBLE + 32);
            at = 0;
        }
    }
    lanes[0] = low;
    lanes[1] = high;
}

void move_avx2(Sum &sum, uint8_t *to, const uint8_t *from, size_t stripes) {
    const bool aligned = reinterpret_cast<uintptr_t>(to) % 32 == 0;
    (to == from ? move_wide<Store::NOT> : aligned ? move_wide<Store::PAST> : move_wide<Store::NEAR>)(
        sum, to, from, stripes);
}

// Asked once: on a virtual machine the question goes to the hypervisor.
const bool WIDE = __builtin_cpu_supports("avx2");

Move best() { return WIDE ? move_avx2 : move_plain; }

// Stores past the cache are seen by others in their order from here on.
void settle() { _mm_sfence(); }

#else

Move best() { return move_plain; }
void settle() {}

#endif

// The parts of one copy, one after the other. Where a part is copied to itself it is only summed.
class Copying {
  public:
    Copying(Move move, size_t total) : move_(move), total_(total) {}

    void part(uint8_t *to, const uint8_t *from, size_t size) {
        uint8_t *const begin = to;
        if (held_) {
            const size_t more = std::min(size, STRIPE - held_);
            hold(to, from, more);
            to += more, from += more;
        }
        const size_t left = size - static_cast<size_t>(to - begin);
        const size_t stripes = std::min(left / STRIPE, whole_ - sum_.stripes);
        move_(sum_, to, from, stripes);
        const size_t moved = stripes * STRIPE;
        if (left > moved) hold(to + moved, from + moved, left - moved);
        at_ += size;
        const size_t tail = total_ - STRIPE;  // where the last stripe begins
        if (at_ > tail) {
            const size_t mine = std::min(size, at_ - tail);
            std::memcpy(last_ + (at_ - mine - tail), begin + size - mine, mine);
        }
    }

    nb::object sum() {
        for (size_t i = 0; i < TWOS; i++)
            sum_.lanes[i] = added(sum_.lanes[i], two(last_ + 16 * i), SCRAMBLE - 7 + 16 * i);
        const uint64_t low = merged(SECRET + 11, total_ * P64_1);
        const uint64_t high = merged(SCRAMBLE - 11, ~(total_ * P64_2));
        return nb::int_(high) << nb::int_(64) | nb::int_(low);
    }

  private:
    // Less than a stripe: it is taken in when that is whole, unless it is the end of all.
    void hold(uint8_t *to, const uint8_t *from, size_t size) {
        if (sum_.stripes == whole_) {
            if (to != from) std::memcpy(to, from, size);
            return;
        }
        std::memcpy(held_stripe_ + held_, from, size);
        std::memcpy(to, held_stripe_ + held_, size);
        held_ += size;
        if (held_ == STRIPE) {
            uint8_t nowhere[STRIPE];
            move_plain(sum_, nowhere, held_stripe_, 1);
            held_ = 0;
        }
    }

    uint64_t merged(const uint8_t *secret, uint64_t value) const {
        for (size_t i = 0; i < TWOS; i++) {
            const Two keyed = sum_.lanes[i] ^ two(secret + 16 * i);
            const unsigned __int128 product = static_cast<unsigned __int128>(keyed[0]) * keyed[1];
            value += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
        }
        value = (value ^ value >> 37) * 0x165667919e3779f9;
        return value ^ value >> 32;
    }

    const Move move_;
    const size_t total_, whole_ = (total_ - 1) / STRIPE;  // stripes that the last may overlap
    size_t at_ = 0, held_ = 0;
    Sum sum_;
    uint8_t held_stripe_[STRIPE], last_[STRIPE];
};

// 0 stands for unknown.
nb::object known(const nb::object &sum) {
    return PyObject_IsTrue(sum.ptr()) ? sum : nb::object(nb::int_(1));
}

nb::object sum_of_few(const uint8_t *data, size_t size) {
    const nb::object library = nb::module_::import_("xxhash").attr("xxh3_128_intdigest");
    return known(library(nb::bytes(data, size)));
}

// What comes in from a stream socket, by a deadline. Others run meanwhile.
class Source {
  public:
    // Why no more comes: a number of errno, 0 where the other side has closed.
    struct Ended {
        int why;
    };

    Source(int socket, const View &ahead, double until)
        : socket_(socket), ahead_(ahead.data()), left_(ahead.size()), until_(until) {}

    // Some of what comes next, at most ``size`` bytes, first of what was read before. Throws Ended.
    size_t some(uint8_t *to, size_t size) {
        if (left_) {
            const size_t had = std::min(size, left_);
            std::memcpy(to, ahead_, had);
            ahead_ += had, left_ -= had;
            return had;
        }
        for (;;) {
            limit();
            const ssize_t got = recv(socket_, to, size, MSG_WAITALL);
            if (got > 0) return static_cast<size_t>(got);
            if (!got) throw Ended{0};
            if (errno != EAGAIN && errno != EINTR) throw Ended{errno};
        }
    }

  private:
    static double now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
    }

    // The kernel's own timeout, set anew where the last is older than this.
    static constexpr double SLACK_S = 0.02;

    void limit() {
        const double at = now(), left = until_ - at;
        if (left <= 0) throw Ended{ETIMEDOUT};
        if (at - set_at_ < SLACK_S) return;
        set_at_ = at;
        timeval wait;
        wait.tv_sec = static_cast<time_t>(left);
        wait.tv_usec = std::max<suseconds_t>(
            1, static_cast<suseconds_t>((left - static_cast<double>(wait.tv_sec)) * 1e6));
        if (setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait)) throw Ended{errno};
    }

    const int socket_;
    const uint8_t *ahead_;
    size_t left_;
    const double until_;
    double set_at_ = -1;
};

constexpr size_t CHUNK = 64 << 10;  // received and summed at once: it is still near then

[[noreturn]] void told(const Source::Ended &ended) {
    if (ended.why == ETIMEDOUT) {
        PyErr_SetString(PyExc_TimeoutError, "the deadline has passed");
    } else if (!ended.why) {
        PyErr_SetString(PyExc_ConnectionResetError, "the other side closed the connection");
    } else {
        errno = ended.why;
        PyErr_SetFromErrno(PyExc_OSError);
    }
    throw nb::python_error();
}

nb::list received(int socket, nb::handle ahead, nb::sequence targets, double until) {
    const View before(ahead);
    std::deque<View> views;
    for (nb::handle target : targets) views.emplace_back(target, PyBUF_WRITABLE);
    std::vector<Copying> sums;
    for (const View &view : views) sums.emplace_back(best(), std::max(view.size(), STRIPE));
    Source source(socket, before, until);
    try {
        nb::gil_scoped_release others;
        for (size_t n = 0; n < views.size(); n++) {
            uint8_t *at = views[n].data(), *const end = at + views[n].size();
            while (at < end) {
                const size_t got = source.some(at, std::min<size_t>(CHUNK, end - at));
                if (views[n].size() > SHORT) sums[n].part(at, at, got);
                at += got;
            }
        }
    } catch (const Source::Ended &ended) {
        told(ended);
    }
    nb::list out;
    for (size_t n = 0; n < views.size(); n++)
        out.append(views[n].size() > SHORT ? known(sums[n].sum())
                                           : sum_of_few(views[n].data(), views[n].size()));
    return out;
}

// Pages that a block has in some layers. In each layer's memory they lie at equal distances.
class Rows {
  public:
    explicit Rows(nb::sequence layers) {
        for (nb::handle layer : layers) {
            const auto [memory, page, step] = nb::cast<std::tuple<nb::object, size_t, size_t>>(layer);
            layers_.emplace_back(memory, page, step);
            size_ += page;
        }
    }

    Rows(const Rows &) = delete;

    size_t size() const { return size_; }

    template <typename Each> void pages(size_t block, Each each) const {
        for (const Layer &layer : layers_) {
            if (block >= layer.count) throw nb::index_error("no such block");
            each(layer.memory.data() + block * layer.step, layer.page);
        }
    }

  private:
    struct Layer {
        Layer(nb::handle object, size_t page, size_t step)
            : memory(object, PyBUF_WRITABLE), page(page), step(step) {
            if (!page || step < page) throw nb::value_error("pages of a row do not overlap");
            if (memory.size() >= page) count = (memory.size() - page) / step + 1;
        }
        const View memory;
        const size_t page, step;
        size_t count = 0;
    };

    std::deque<Layer> layers_;
    size_t size_ = 0;
};

struct Span {
    uint8_t *data;
    size_t size;
};

// The parts of a copy, and what keeps them where they are.
struct Parts {
    Parts(nb::handle parts, int flags)
        : listed(nb::steal(PySequence_Fast(parts.ptr(), "parts are no sequence"))) {
        if (!listed.is_valid()) throw nb::python_error();
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(listed.ptr()); i++) {
            const nb::handle part = PySequence_Fast_GET_ITEM(listed.ptr(), i);
            if (PyTuple_Check(part.ptr())) {
                const auto [rows, block] = nb::cast<std::tuple<const Rows *, size_t>>(part);
                rows->pages(block, [this](uint8_t *at, size_t size) { add(at, size); });
            } else {
                views.emplace_back(part, flags);
                add(views.back().data(), views.back().size());
            }
        }
    }

    void add(uint8_t *data, size_t size) {
        spans.push_back({data, size});
        total += size;
    }

    const nb::object listed;
    std::deque<View> views;
    std::vector<Span> spans;
    size_t total = 0;
};

// ``all`` ← ``parts`` or the way back. Nothing is touched where they do not fit.
nb::object copied(Move move, nb::handle all, nb::handle given, bool gathering) {
    const View row(all, gathering ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    const Parts parts(given, gathering ? PyBUF_SIMPLE : PyBUF_WRITABLE);
    if (parts.total > row.size()) {
        const std::string size = std::to_string(parts.total), room = std::to_string(row.size());
        throw nb::value_error(("parts of " + size + " bytes where " + room + " are").c_str());
    }
    uint8_t *at = row.data();
    if (parts.total <= SHORT) {
        uint8_t seen[SHORT], *next = seen;
        for (const Span &part : parts.spans) {
            std::memcpy(next, gathering ? part.data : at, part.size);
            std::memcpy(gathering ? at : part.data, next, part.size);
            at += part.size, next += part.size;
        }
        return sum_of_few(seen, parts.total);
    }
    Copying copying(move, parts.total);
    {
        nb::gil_scoped_release others;
        for (const Span &part : parts.spans) {
            copying.part(gathering ? at : part.data, gathering ? part.data : at, part.size);
            at += part.size;
        }
        settle();
    }
    return known(copying.sum());
}

}  // namespace

NB_MODULE(_copies, module) {
    nb::class_<Rows>(module, "Rows", nb::is_final())
        .def(nb::init<nb::sequence>())
        .def_prop_ro("size_bytes", &Rows::size);
    module.def("gather", [](nb::handle target, nb::handle parts) {
        return copied(best(), target, parts, true);
    });
    module.def("scatter", [](nb::handle source, nb::handle parts) {
        return copied(best(), source, parts, false);
    });
    module.def("receive", received);
    module.def("gather_plain", [](nb::handle target, nb::handle parts) {
        return copied(move_plain, target, parts, true);
    });
    module.def("scatter_plain", [](nb::handle source, nb::handle parts) {
        return copied(move_plain, source, parts, false);
    });
}
