/* check.h - the parts of a kernel's check: cases, guarded buffers, calls and comparisons.
 *
 * To add kernel NAME of kvant_kernels, add X(NAME) to CHECK_KERNELS (the build fails until it is
 * there) and define CHECK(NAME) and BENCH(NAME) in the file of its family. A check goes through
 * shapes, tails and fills. For each it names the case and takes buffers of exactly the size and
 * alignment that kernels.h promises. Then it computes the expected result, and calls the kernel of
 * the level under test through CHECK_CALL.
 *
 * A check runs at every level, portable C included: once with every buffer ending at an unmapped
 * page, and once with every buffer beginning after an unmapped page. */
#ifndef KVANT_TESTS_KERNELS_CHECK_H
#define KVANT_TESTS_KERNELS_CHECK_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../../src/base/attributes.h"
#include "../../src/base/half.h"
#include "../../src/base/random.h"
#include "../../src/kernels/kernels.h"

#define CHECK_KERNELS(X)                                                                           \
    X(unpack)                                                                                      \
    X(matmul)                                                                                      \
    X(exp_sum)                                                                                     \
    X(mask_scores)                                                                                 \
    X(half_to_float)                                                                               \
    X(scale_columns)                                                                               \
    X(scale_rows)                                                                                  \
    X(float_to_half)                                                                               \
    X(dot)                                                                                         \
    X(dot_rows)                                                                                    \
    X(dot_codes)                                                                                   \
    X(combine_rows)                                                                                \
    X(add_outers)                                                                                  \
    X(mean_factor)                                                                                 \
    X(lower_inverse)                                                                               \
    X(triangle_row)                                                                                \
    X(solve_lower)                                                                                 \
    X(solve_upper)                                                                                 \
    X(multiply_upper)                                                                              \
    X(hadamard)                                                                                    \
    X(range)                                                                                       \
    X(magnitude)                                                                                   \
    X(uniform_codes)                                                                               \
    X(codebook_codes)                                                                              \
    X(feedback_codes)                                                                              \
    X(triplet_codes)                                                                               \
    X(closest_cosets)                                                                              \
    X(largest_products)                                                                            \
    X(token_halves)                                                                                \
    X(key_halves)                                                                                  \
    X(fixed_point)                                                                                 \
    X(code_dots)                                                                                   \
    X(sum_dots)                                                                                    \
    X(tile_sums)                                                                                   \
    X(unpack_triplets)                                                                             \
    X(unpack_directions)                                                                           \
    X(block_scores)                                                                                \
    X(block_sums)                                                                                  \
    X(block_rows_tile)                                                                             \
    X(block_columns_tile)                                                                          \
    X(chunk_dots)                                                                                  \
    X(trellis_path)                                                                                \
    X(trellis_dots)                                                                                \
    X(trellis_values)                                                                              \
    X(trellis_pack)                                                                                \
    X(pack_dots)                                                                                   \
    X(pack_keys)

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

typedef struct checker checker;

/* kernels: the level under test; c: portable C. */
#define CHECK(name)                                                                                \
    void check_##name(checker *check, const kvant_kernels *kernels, const kvant_kernels *c)
#define BENCH(name) void bench_##name(checker *check, const kvant_kernels *kernels)
#define DECLARED(name)                                                                             \
    CHECK(name);                                                                                   \
    BENCH(name);
CHECK_KERNELS(DECLARED)
#undef DECLARED
typedef CHECK(fn);
typedef BENCH(fn);

/* Begins a case, which every report names, and frees the buffers of the case before. */
void check_case(checker *check, const char *format, ...) KVANT_PRINTF(2, 3);

/* Returns a buffer that is valid until the next case; there are at most 16 of at most 1 MiB.
 * Alignments are powers of two up to a page's. The kernel may not write to an input. An output is
 * filled with bytes 0x55, so that numbers that were not written are conspicuous. */
void *check_input(checker *check, const char *name, size_t bytes, size_t alignment);
void *check_output(checker *check, const char *name, size_t bytes, size_t alignment);

/* Calls the kernel under test. Inputs are read-only meanwhile, and the bytes around buffers are
 * checked afterwards. */
#define CHECK_CALL(check, call)                                                                    \
    do {                                                                                           \
        check_enter(check);                                                                        \
        call;                                                                                      \
        check_leave(check);                                                                        \
    } while (0)
void check_enter(checker *check);
void check_leave(checker *check);

/* Returns false if results do not count (--faults-only). A check may then skip the expected
 * results. */
bool check_compares(const checker *check);

/* Compares results. The first differences of a kernel at a level are printed, further ones only
 * counted. */
void check_fail(checker *check, const char *format, ...) KVANT_PRINTF(2, 3);
void check_near(checker *check, const char *name, size_t index, double got, double want,
                double bound);
void check_same(checker *check, const char *name, const void *got, const void *want, size_t n,
                size_t size);

/* Times a call: CHECK_BENCH(check, kernels->f(...), "n %u", n). */
#define CHECK_BENCH(check, call, ...)                                                              \
    for (check_bench_start(check, __VA_ARGS__); check_bench_more(check);)                          \
        for (uint64_t left_ = check_bench_calls(check); left_; left_--) {                          \
            call;                                                                                  \
        }
void check_bench_start(checker *check, const char *shape, ...) KVANT_PRINTF(2, 3);
bool check_bench_more(checker *check);
uint64_t check_bench_calls(const checker *check);

/* Random numbers, which are the same for every level. */
uint64_t check_random(checker *check);
uint32_t check_below(checker *check, uint32_t n);
float check_uniform(checker *check); /* within (0, 1) */
float check_normal(checker *check);

/* The numbers that a buffer is filled with. LARGEST and SMALLEST are +- 2^40, so their products and
 * sums stay finite. AWKWARD has zeros of both signs, denormals, huge numbers and equal neighbours
 * among normal numbers. */
typedef enum check_fill {
    CHECK_NORMAL,
    CHECK_ZEROS,
    CHECK_LARGEST,
    CHECK_SMALLEST,
    CHECK_DENORMAL,
    CHECK_AWKWARD,
    CHECK_N_FILLS
} check_fill;
const char *check_fill_name(check_fill fill);
void check_floats(checker *check, float *x, size_t n, check_fill fill);
void check_bytes(checker *check, void *bytes, size_t n,
                 int value); /* all bytes are value, or random if value < 0 */

/* The largest change of x by one rounding to binary32 without overflow. References in double err by
 * less than 2^-20 of that. */
static inline double check_rounding(double x)
{
    return fmax(fabs(x) * 0x1p-24, 0x1p-150) * (1 + 0x1p-20);
}

#endif
