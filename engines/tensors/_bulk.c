/* Bytes copied past the caches and hashed on their way, and values checked, many ranges in one call.

   Always true: only [target, target + size) of each range is written; a digest is XXH3's of 128 bits,
   of a head followed by the range's bytes as they were just after they were copied.

   A copy that goes past the caches takes as long as memory does; hashing what it has just read, still
   in the core's first cache, then takes no time of its own.  glibc's memcpy writes around the caches
   only from a size on that few tensors have, and reads each line before it is written otherwise.

   The hash is XXH3 for more than 240 bytes, with its default secret and no seed:
   https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md ("XXH3 Algorithm - Large inputs").

   Called through ctypes (bulk.py), which lets go of the interpreter meanwhile. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <immintrin.h>

enum {
    LINE = 64,
    STRIPE = 64,
    LANES = 8,
    STRIPES_OF_A_BLOCK = 16,
    SECRET_BYTES = 192,
    /* Two blocks: what was copied is still in the first cache, beside what the core reads ahead. */
    PIECE = 2048,
    /* How far ahead a copy reads: within pieces that are hashed farther is slower, else nearer is. */
    AHEAD = 1024,
    AHEAD_IN_PIECES = 256,
    SHORT = 240,
};

static const uint64_t P32_1 = 0x9E3779B1U, P32_2 = 0x85EBCA77U, P32_3 = 0xC2B2AE3DU;
static const uint64_t P64_1 = 0x9E3779B185EBCA87U, P64_2 = 0xC2B2AE3D27D4EB4FU,
                      P64_3 = 0x165667B19E3779F9U, P64_4 = 0x85EBCA77C2B2AE63U,
                      P64_5 = 0x27D4EB2F165667C5U;

static const uint8_t SECRET[SECRET_BYTES] = {
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

static uint64_t read64(const void *place) {
    uint64_t value;
    memcpy(&value, place, sizeof value);
    return value;
}

/* ---- what there is one of for each kind of processor -------------------------------------------- */

typedef void Copy(char *to, const char *from, size_t size, size_t ahead);
/* Stripes one after the other, each with the secret 8 bytes further on. */
typedef void Mix(uint64_t sums[LANES], const char *stripes, size_t count, const uint8_t *secret);

typedef struct {
    Copy *copy;
    Mix *mix;
} Way;

/* The whole lines of `to` written past the caches, in vectors of VECTOR bytes; the ends as usual. */
#define COPY_PAST_CACHES(VECTOR, LOAD, STREAM)                                                     \
    size_t before = -(uintptr_t)to % LINE;                                                         \
    if (size < before + LINE) {                                                                    \
        memcpy(to, from, size);                                                                    \
        return;                                                                                    \
    }                                                                                              \
    memcpy(to, from, before);                                                                      \
    size_t done = before;                                                                          \
    for (; done + LINE <= size; done += LINE) {                                                    \
        _mm_prefetch(from + done + ahead, _MM_HINT_T0);                                            \
        for (int at = 0; at < LINE; at += VECTOR)                                                  \
            STREAM((void *)(to + done + at), LOAD((const void *)(from + done + at)));              \
    }                                                                                              \
    memcpy(to + done, from + done, size - done);

__attribute__((target("avx2"))) static void copy_avx2(char *to, const char *from, size_t size,
                                                      size_t ahead) {
    COPY_PAST_CACHES(32, _mm256_loadu_si256, _mm256_stream_si256)
}

__attribute__((target("avx512f"))) static void copy_avx512(char *to, const char *from, size_t size,
                                                           size_t ahead) {
    COPY_PAST_CACHES(64, _mm512_loadu_si512, _mm512_stream_si512)
}

__attribute__((target("avx2"))) static void mix_avx2(uint64_t sums[LANES], const char *stripes,
                                                     size_t count, const uint8_t *secret) {
    for (int half = 0; half < 2; half++) {
        __m256i *place = (__m256i *)sums + half, sum = _mm256_loadu_si256(place);
        for (size_t stripe = 0; stripe < count; stripe++) {
            size_t at = 32 * half;
            __m256i value = _mm256_loadu_si256((const void *)(stripes + stripe * STRIPE + at));
            __m256i part = _mm256_loadu_si256((const void *)(secret + stripe * 8 + at));
            __m256i key = _mm256_xor_si256(value, part);
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
            sum = _mm256_add_epi64(sum, _mm256_add_epi64(product, swapped));
        }
        _mm256_storeu_si256(place, sum);
    }
}

__attribute__((target("avx512f"))) static void mix_avx512(uint64_t sums[LANES],
                                                          const char *stripes, size_t count,
                                                          const uint8_t *secret) {
    __m512i sum = _mm512_loadu_si512(sums);
    for (size_t stripe = 0; stripe < count; stripe++) {
        __m512i value = _mm512_loadu_si512(stripes + stripe * STRIPE);
        __m512i key = _mm512_xor_si512(value, _mm512_loadu_si512(secret + stripe * 8));
        __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        __m512i swapped = _mm512_shuffle_epi32(value, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
    }
    _mm512_storeu_si512(sums, sum);
}

static const Way AVX2 = {copy_avx2, mix_avx2};
static const Way AVX512 = {copy_avx512, mix_avx512};

/* ---- XXH3 ----------------------------------------------------------------------------------------- */

typedef struct {
    const Way *way;
    uint64_t sums[LANES];
    size_t stripe; /* of the block that is under way */
} Hash;

static Hash started(const Way *way) {
    return (Hash){way, {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1}, 0};
}

static void scramble(uint64_t sums[LANES]) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t sum = sums[lane];
        sum ^= sum >> 47;
        sum ^= read64(SECRET + SECRET_BYTES - STRIPE + lane * 8);
        sums[lane] = sum * P32_1;
    }
}

static void take(Hash *hash, const char *stripes, size_t count) {
    while (count) {
        size_t room = STRIPES_OF_A_BLOCK - hash->stripe, now = count < room ? count : room;
        hash->way->mix(hash->sums, stripes, now, SECRET + hash->stripe * 8);
        stripes += now * STRIPE;
        count -= now;
        hash->stripe += now;
        if (hash->stripe == STRIPES_OF_A_BLOCK) {
            scramble(hash->sums);
            hash->stripe = 0;
        }
    }
}

static uint64_t merged(const uint64_t sums[LANES], const uint8_t *secret, uint64_t result) {
    for (int pair = 0; pair < LANES / 2; pair++) {
        unsigned __int128 product =
            (unsigned __int128)(sums[2 * pair] ^ read64(secret + 16 * pair)) *
            (sums[2 * pair + 1] ^ read64(secret + 16 * pair + 8));
        result += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    result ^= result >> 37;
    result *= 0x165667919E3779F9U;
    return result ^ (result >> 32);
}

static void put_big_endian(uint8_t *place, uint64_t value) {
    for (int byte = 0; byte < 8; byte++) place[byte] = (uint8_t)(value >> (56 - 8 * byte));
}

static void finish(Hash *hash, const char *last_stripe, uint64_t size, uint8_t digest[16]) {
    hash->way->mix(hash->sums, last_stripe, 1, SECRET + SECRET_BYTES - STRIPE - 7);
    put_big_endian(digest, merged(hash->sums, SECRET + SECRET_BYTES - STRIPE - 11,
                                  ~(size * P64_2)));
    put_big_endian(digest + 8, merged(hash->sums, SECRET + 11, size * P64_1));
}

/* ---- values ----------------------------------------------------------------------------------- */

/* Whether a value of WIDTH bits is NaN or infinite: all bits of its exponent, `mask`, are set. */
#define HAS_NONFINITE(WIDTH, TYPE)                                                                 \
    __attribute__((target("avx2"))) static int has_nonfinite##WIDTH(const char *from, size_t size, \
                                                                    TYPE mask) {                   \
        __m256i all = _mm256_set1_epi##WIDTH((int##WIDTH##_t)mask), bad = _mm256_setzero_si256();  \
        size_t done = 0;                                                                           \
        for (; done + 2 * LINE <= size; done += 2 * LINE) {                                        \
            for (int at = 0; at < 2 * LINE; at += 32) {                                            \
                __m256i value = _mm256_loadu_si256((const void *)(from + done + at));              \
                __m256i same = _mm256_cmpeq_epi##WIDTH(_mm256_and_si256(value, all), all);         \
                bad = _mm256_or_si256(bad, same);                                                  \
            }                                                                                      \
        }                                                                                          \
        int found = !_mm256_testz_si256(bad, bad);                                                 \
        for (; done < size; done += sizeof(TYPE)) {                                                \
            TYPE value;                                                                            \
            memcpy(&value, from + done, sizeof value);                                             \
            found |= (value & mask) == mask;                                                       \
        }                                                                                          \
        return found;                                                                              \
    }

HAS_NONFINITE(16, uint16_t)
HAS_NONFINITE(32, uint32_t)

/* `mask` is the exponent of the values' type: of more than 16 bits for values of 32; 0 for others. */
static int has_nonfinite(const char *from, size_t size, uint64_t mask) {
    if (!mask) return 0;
    return mask >> 16 ? has_nonfinite32(from, size, (uint32_t)mask)
                      : has_nonfinite16(from, size, (uint16_t)mask);
}

/* ---- ranges --------------------------------------------------------------------------------------- */

/* Copy `from` and check its values, piece by piece; `done` says how much of it is copied. */
static int copy_piece(const Way *way, char *to, const char *from, size_t size, uint64_t mask,
                      size_t *done) {
    /* The first ends where a line of the target does, and so do all others. */
    size_t begin = *done, now = PIECE - (uintptr_t)(to + begin) % LINE;
    if (now > size - begin) now = size - begin;
    if (to != from) way->copy(to + begin, from + begin, now, AHEAD_IN_PIECES);
    *done = begin + now;
    /* A value that lies across two pieces belongs to the second. */
    size_t first = begin & ~(size_t)3, end = *done < size ? *done & ~(size_t)3 : size;
    return has_nonfinite(from + first, end - first, mask);
}

static int copy_checked(const Way *way, char *to, const char *from, size_t size, uint64_t mask) {
    int found = 0;
    for (size_t done = 0; done < size;) found |= copy_piece(way, to, from, size, mask, &done);
    return found;
}

/* The digest of `head` and `from`, which is copied on the way unless it is `to` already. */
static int copy_hashed(const Way *way, char *to, const char *from, size_t size, const char *head,
                       size_t head_size, uint64_t mask, uint8_t digest[16]) {
    int found = 0;
    Hash hash = started(way);
    /* All but the last, which is taken in at the end and may have bytes of the one before it. */
    size_t left = (head_size + size - 1) / STRIPE;
    size_t whole = head_size / STRIPE < left ? head_size / STRIPE : left;
    take(&hash, head, whole);
    left -= whole;

    char across[STRIPE];
    size_t rest = head_size - whole * STRIPE, hashed = 0;
    if (left && rest) {
        hashed = STRIPE - rest;
        memcpy(across, head + head_size - rest, rest);
        memcpy(across + rest, from, hashed);
        take(&hash, across, 1);
        left--;
    }
    for (size_t done = 0; done < size;) {
        found |= copy_piece(way, to, from, size, mask, &done);
        size_t ready = done > hashed ? (done - hashed) / STRIPE : 0;
        if (ready > left) ready = left;
        take(&hash, from + hashed, ready);
        hashed += ready * STRIPE;
        left -= ready;
    }
    const char *last = from + size - STRIPE;
    if (size < STRIPE) {
        memcpy(across, head + head_size - (STRIPE - size), STRIPE - size);
        memcpy(across + STRIPE - size, from, size);
        last = across;
    }
    finish(&hash, last, head_size + size, digest);
    return found;
}

/* The best code this processor can run: 2 AVX-512, 1 AVX2, 0 none. */
EXPORTED int bulk_kind(void) {
    return __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
}

/* Copy `count` ranges by code of `kind`; with `digests` (16 bytes for each, as XXH3 writes them) hash
   each of them too, after its own head: `heads` lie one after the other.  A target that is its source
   is only hashed.  Of 240 bytes or less, head included, XXH3 is another function: no digest is written.
   With `masks`, `found` gets what bulk_nonfinite writes, of ranges of whole values. */
EXPORTED void bulk_copy_and_check(int kind, size_t count, const uint64_t *targets,
                                  const uint64_t *sources, const uint64_t *sizes,
                                  const char *heads, const uint64_t *head_sizes, uint8_t *digests,
                                  const uint64_t *masks, uint8_t *found) {
    const Way *way = kind == 2 ? &AVX512 : &AVX2;
    for (size_t one = 0; one < count; one++) {
        char *to = (char *)(uintptr_t)targets[one];
        const char *from = (const char *)(uintptr_t)sources[one];
        size_t size = sizes[one], head_size = digests ? head_sizes[one] : 0;
        uint64_t mask = masks ? masks[one] : 0;
        int is_bad = 0;
        if (digests && head_size + size > SHORT)
            is_bad = copy_hashed(way, to, from, size, heads, head_size, mask, digests + 16 * one);
        else if (mask)
            is_bad = copy_checked(way, to, from, size, mask);
        else if (to != from)
            way->copy(to, from, size, AHEAD);
        if (masks) found[one] = (uint8_t)is_bad;
        heads += head_size;
    }
    _mm_sfence(); /* a thread that learns that the copy is done sees its bytes */
}

/* Write into `found`, for each range of whole values, whether one is NaN or infinite. */
EXPORTED void bulk_nonfinite(size_t count, const uint64_t *places, const uint64_t *sizes,
                             const uint64_t *masks, uint8_t *found) {
    for (size_t one = 0; one < count; one++) {
        const char *from = (const char *)(uintptr_t)places[one];
        found[one] = (uint8_t)has_nonfinite(from, sizes[one], masks[one]);
    }
}

#else /* another processor: bulk_copy.py copies without it */

EXPORTED int bulk_kind(void) { return 0; }

#endif
