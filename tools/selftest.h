/* selftest.h - what the parts of `kvant selftest` share: problems (selftest_problem.c)
 * with references (selftest_reference.c), the checks and speeds of CPUs (selftest_cpu.c) and GPUs
 * (selftest_gpu.c), and results on paper (selftest_report.c).
 *
 * A problem is a pair of codecs at one head_dim: rows, the pages that portable C makes of them, the
 * rows that it decodes from these pages, and calls of attention with outputs in double precision.
 * Every device is compared with the same problem. */
#ifndef KVANT_TOOLS_SELFTEST_H
#define KVANT_TOOLS_SELFTEST_H

#include <kvant/calibration.h>
#include <kvant/codec.h>
#include <kvant/tensor.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* The last of three pages is not full: 165 tokens. Eight query heads share two kv heads. */
enum { TEST_KV_HEADS = 2, TEST_GROUP = 4, TEST_HEADS = TEST_KV_HEADS * TEST_GROUP };
enum { TEST_BLOCKS = 3, TEST_ROWS = 64 * TEST_BLOCKS, TEST_TOKENS = 165, TEST_CALLS = 4 };
enum { TEST_SPEC_BYTES = 80, TEST_NAME_BYTES = 128, TEST_WHY_BYTES = 240 };

typedef enum test_state {
    TEST_NOT_DONE,
    TEST_RIGHT,
    TEST_WRONG,
    TEST_NO_KERNEL, /* the device does not take this codec; not a pass */
    TEST_FAILED     /* a call returned an error */
} test_state;

typedef struct test_pair {
    char k[TEST_SPEC_BYTES], v[TEST_SPEC_BYTES];
    uint32_t head_dim;
} test_pair;

typedef struct test_device {
    bool gpu;
    int ordinal;                  /* of a GPU */
    kvant_cpu_level level;        /* of a CPU */
    char name[TEST_NAME_BYTES];   /* of the model: "AMD EPYC", "NVIDIA H100" */
    char label[TEST_NAME_BYTES];  /* for people: "CPU avx2", "GPU 0 (NVIDIA H100)" */
    char missing[TEST_WHY_BYTES]; /* why it could not be tried, or "" */
    /* GPUs only; 0: not known */
    int major, minor, multiprocessors, shared_bytes, l2_bytes, driver_cuda;
    double memory_bytes;
} test_device;

typedef struct test_result {
    size_t device;
    test_pair pair;
    test_state encode, decode, attention;
    double decode_share, attention_share; /* the largest error / bound */
    char why[TEST_WHY_BYTES];             /* of the first state that is not right */
} test_result;

/* Keys and values of one layer: `sequences` sequences of `tokens` tokens. */
typedef struct test_speed {
    size_t device;
    test_pair pair;
    uint32_t sequences, tokens, heads, kv_heads, threads;
    double bytes;       /* of all pages that attention reads */
    double encode_rows; /* per second: keys and values of head_dim numbers; NaN: not measured */
    double attention;   /* seconds for one query token of every sequence */
    double copy;        /* seconds for a copy of as many bytes */
} test_speed;

/* GPUs and CPUs have different arithmetic. */
typedef enum test_place { TEST_ON_GPU, TEST_ON_CPU } test_place;

/* A call of attention with n_queries query tokens, causal when there is more than one. Outputs of
 * every `step`-th query token have a reference: row (i / step) x TEST_HEADS + head. */
typedef struct test_call {
    uint32_t n_queries, step;
    float *q;             /* n_queries x TEST_HEADS x head_dim; every number is exact in bf16 */
    double *out;          /* rows x head_dim */
    double *lse;          /* rows: without what a centre of keys adds to all scores */
    double *center;       /* rows: what it adds */
    double *bound[2];     /* rows: of the Euclidean length of an output's error; by test_place */
    double *lse_bound[2]; /* rows */
} test_call;

typedef struct test_problem {
    test_pair pair;
    kvant_codec *codec[2][TEST_KV_HEADS]; /* by kvant_role and kv head */
    kvant_codec_info info[2];
    kvant_affine affine[2][TEST_KV_HEADS];
    float *rows[2];    /* TEST_ROWS x TEST_KV_HEADS x head_dim; exact in bf16 */
    uint8_t *pages[2]; /* TEST_BLOCKS x TEST_KV_HEADS pages of portable C */
    float *decoded[2]; /* as rows: what portable C reads in these pages */
    test_call calls[TEST_CALLS];
} test_problem;

/* A tensor of a problem's codecs, with its memory. */
typedef struct test_tensor {
    kvant_tensor *tensor;
    void *memory;
} test_tensor;

/* Pairs to try; *n of them, to be freed; NULL without memory. only: a spec instead of all codecs.
 * */
test_pair *test_pairs(const char *only, size_t *n);

/* A calibration of random rows for codecs that take one; NULL without memory. */
kvant_calibration *test_calibration(uint32_t head_dim);

/* Makes a problem at the CPU level C, and leaves the level there. KVANT_ERR_UNSUPPORTED: the codec
 * does not exist at this head_dim. why has a line after an error. Close it in any case. */
kvant_status test_problem_open(test_problem *p, const test_pair *pair,
                               const kvant_calibration *calibration, char *why);
void test_problem_close(test_problem *p);
/* Fills p->calls; false without memory. */
bool test_calls_make(test_problem *p);

/* The nearest number towards 0 that bf16 has. */
float test_cut(double x);

/* A tensor with all rows of a role written. kvant_error_message() tells of errors. */
kvant_status test_tensor_open(test_tensor *t, const test_problem *p, kvant_role role,
                              uint32_t threads);
void test_tensor_close(test_tensor *t);
/* The sealed page of a tensor; NULL where a block is not sealed. */
const uint8_t *test_tensor_page(const test_tensor *t, uint32_t block, uint32_t head);
static inline size_t test_page_at(const test_problem *p, kvant_role role, uint32_t block,
                                  uint32_t head)
{
    return ((size_t)block * TEST_KV_HEADS + head) * p->info[role].page_bytes;
}

/* Each notes what is wrong in the result: bytes of one role's pages; decoded rows; the outputs of a
 * call. lse NULL: not computed. rounding: of a number of the output type, relative. */
void test_compare_pages(test_result *r, const test_problem *p, kvant_role role,
                        const uint8_t *pages);
void test_compare_rows(test_result *r, const test_problem *p, kvant_role role, const float *rows);
typedef struct test_outputs {
    const float *out, *lse;
    double rounding;
    test_place place;
    bool centered; /* lse has the centre's part */
} test_outputs;
void test_compare_call(test_result *r, const test_problem *p, size_t call, const test_outputs *got);

/* Sets *state to a worse one, and why if it is the first. */
void test_note(test_result *r, test_state *state, test_state found, const char *format, ...);

/* Everything about one run. */
typedef struct test_report {
    test_device *devices;
    test_result *results;
    test_speed *speeds;
    size_t n_devices, n_results, n_speeds;
    double seconds;
    uint32_t shared_kib; /* the limit of shared memory per thread block of GPUs; 0: none */
    bool interrupted, no_memory;
} test_report;

/* Adds the CPU levels of this machine, and the GPUs. False without memory. */
bool test_add_cpus(test_report *report);
bool test_add_gpus(test_report *report);
test_device *test_add_device(test_report *report);

void test_cpu_check(const test_device *device, const test_problem *p, test_result *r);
/* KVANT_ERR_UNSUPPORTED: there is no such codec on the device; why has a line after an error. */
kvant_status test_cpu_speed(const test_device *device, test_speed *s, char *why);

typedef struct test_gpu test_gpu;
/* NULL with a line in device->missing. */
test_gpu *test_gpu_open(test_device *device);
void test_gpu_close(test_gpu *gpu);
void test_gpu_check(test_gpu *gpu, const test_problem *p, test_result *r);
kvant_status test_gpu_speed(test_gpu *gpu, test_speed *s, char *why);

/* Whether everything that was tried is right, and everything was tried. */
bool test_all_right(const test_report *report);
/* The table, a line for each result that is not right, and the verdict, on stdout. False after
 * complaining that it cannot be printed. */
bool test_print(const test_report *report);
/* The file: one JSON object. */
void test_write_json(const test_report *report, FILE *out);

#endif /* KVANT_TOOLS_SELFTEST_H */
