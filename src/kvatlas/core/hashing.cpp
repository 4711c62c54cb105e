// Chained SHA-256 with the processor's own SHA instructions (x86-64), see _native.pyi.
//
// A 32k-token prompt is 128 blocks: as many calls into hashlib cost as much again as the hashing.
// Where the processor has no such instructions `accelerated` is false and `core.keys` stays with
// hashlib; the keys are the same.

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "view.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace nb = nanobind;

namespace {

constexpr size_t SECRET = 32, KEY = 16, CHUNK = 64;

#if defined(__x86_64__)

// Asked once: on a virtual machine the question goes to the hypervisor and takes 20 µs or more.
bool accelerated() {
    static const bool known = [] {
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 29 & 1);
    }();
    return known;
}

// FIPS 180-4, 4.2.2: the first 32 bits of the fractional parts of the cube roots of 64 primes.
alignas(16) const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

// The state as the instructions want it: (a b e f) and (c d g h), highest word first.
struct State {
    __m128i abef = _mm_set_epi32(0x6a09e667, (int)0xbb67ae85, 0x510e527f, (int)0x9b05688c);
    __m128i cdgh = _mm_set_epi32(0x3c6ef372, (int)0xa54ff53a, 0x1f83d9ab, 0x5be0cd19);
};

__attribute__((target("sha,sse4.1"))) void compress(State &state, const uint8_t *data,
                                                    size_t chunks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef = state.abef, cdgh = state.cdgh;
    for (; chunks; chunks--, data += CHUNK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];  // the last 16 words of the message schedule
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i &next = w[i % 4];
            if (i < 4) {
                next = _mm_loadu_si128(reinterpret_cast<const __m128i *>(data) + i);
                next = _mm_shuffle_epi8(next, swap);
            } else {
                const __m128i last = w[(i + 3) % 4];
                const __m128i middle = _mm_alignr_epi8(last, w[(i + 2) % 4], 4);
                next = _mm_add_epi32(_mm_sha256msg1_epu32(next, w[(i + 1) % 4]), middle);
                next = _mm_sha256msg2_epu32(next, last);
            }
            const __m128i *round = reinterpret_cast<const __m128i *>(ROUND) + i;
            const __m128i words = _mm_add_epi32(next, _mm_load_si128(round));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    state.abef = abef;
    state.cdgh = cdgh;
}

// The first 16 bytes of the digest: a, b, c and d, big endian.
__attribute__((target("sse4.1"))) void cut(const State &state, uint8_t *key) {
    const uint32_t words[4] = {
        (uint32_t)_mm_extract_epi32(state.abef, 3), (uint32_t)_mm_extract_epi32(state.abef, 2),
        (uint32_t)_mm_extract_epi32(state.cdgh, 3), (uint32_t)_mm_extract_epi32(state.cdgh, 2)};
    for (int i = 0; i < 4; i++) {
        const uint32_t word = __builtin_bswap32(words[i]);
        std::memcpy(key + 4 * i, &word, 4);
    }
}

// key = SHA-256(secret, key, block)[:16]
void step(const uint8_t *secret, uint8_t *key, const uint8_t *block, size_t size) {
    const size_t first = size < KEY ? size : KEY;  // of the block, in the first chunk
    uint8_t buffer[2 * CHUNK] = {};
    std::memcpy(buffer, secret, SECRET);
    std::memcpy(buffer + SECRET, key, KEY);
    std::memcpy(buffer + SECRET + KEY, block, first);
    State state;
    size_t tail = SECRET + KEY + first;
    if (tail == CHUNK) {
        compress(state, buffer, 1);
        const size_t chunks = (size - first) / CHUNK;
        compress(state, block + first, chunks);
        tail = size - first - chunks * CHUNK;
        std::memset(buffer, 0, sizeof buffer);
        std::memcpy(buffer, block + size - tail, tail);
    }
    buffer[tail] = 0x80;
    const size_t chunks = tail + 9 > CHUNK ? 2 : 1;
    const uint64_t bits = __builtin_bswap64((uint64_t)(SECRET + KEY + size) * 8);
    std::memcpy(buffer + chunks * CHUNK - 8, &bits, 8);
    compress(state, buffer, chunks);
    cut(state, key);
}

#else

bool accelerated() { return false; }
void step(const uint8_t *, uint8_t *, const uint8_t *, size_t) {}

#endif

nb::list chain(const nb::bytes &secret, const nb::bytes &parent, nb::handle tokens,
               Py_ssize_t block_bytes) {
    if (!accelerated()) throw std::runtime_error("this processor has no SHA instructions");
    if (secret.size() != SECRET || parent.size() != KEY || block_bytes < 1)
        throw nb::value_error("a secret of 32, a parent of 16 and blocks of > 0 bytes");
    const View view(tokens);
    const Py_ssize_t count = static_cast<Py_ssize_t>(view.size()) / block_bytes;
    nb::list keys = nb::steal<nb::list>(PyList_New(count));
    if (!keys) throw nb::python_error();
    uint8_t key[KEY];
    std::memcpy(key, parent.data(), KEY);
    for (Py_ssize_t i = 0; i < count; i++) {
        step(static_cast<const uint8_t *>(secret.data()), key, view.data() + i * block_bytes,
             static_cast<size_t>(block_bytes));
        PyList_SET_ITEM(keys.ptr(), i, nb::bytes(key, KEY).release().ptr());
    }
    return keys;
}

}  // namespace

void bind_hashing(nb::module_ &module) {
    module.attr("accelerated") = accelerated();
    module.def("chain", chain);
}
