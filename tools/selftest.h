/* selftest.h - the interface between the parts of `kvant selftest`. The file selftest_problem.c
 * makes a problem and selftest_reference.c its reference. The files selftest_cpu.c and
 * selftest_gpu.c run the problem on devices, selftest_compare.c compares, and selftest_report.c
 * prints.
 *
 * A problem is a pair of codecs at one head_dim. It has rows, the pages into which portable C
 * encodes them, and the rows that portable C decodes from these pages. It also has calls of
 * attention with outputs in double precision. Every device is compared with the same problem. */
#pragma once

#include <kvant/calibration.h>
#include <kvant/codec.h>
#include <stdbool.h>
#include <stdio.h>

/* The last of three pages is not full: 165 tokens. Four query heads share a kv head. */
enum { TEST_KV_HEADS = 2, TEST_GROUP = 4, TEST_HEADS = TEST_KV_HEADS * TEST_GROUP };
enum { TEST_BLOCKS = 3, TEST_ROWS = 64 * TEST_BLOCKS, TEST_TOKENS = 165, TEST_CALLS = 4 };
enum { TEST_SPEC_BYTES = 80, TEST_NAME_BYTES = 128, TEST_WHY_BYTES = 240 };

/* kvant measures the speed of one layer: 8 kv heads, and sequences of 8192 tokens. */
enum { SPEED_KV_HEADS = 8, SPEED_HEADS = SPEED_KV_HEADS * TEST_GROUP, SPEED_TOKENS = 8192 };

typedef enum test_state {
    TEST_NOT_DONE,
    TEST_RIGHT,
    TEST_WRONG,
    TEST_NO_KERNEL, /* the device does not take this codec; not a pass */
    TEST_FAILED     /* a call returned an error */
} test_state;

typedef enum test_step { TEST_ENCODE, TEST_DECODE, TEST_ATTENTION, TEST_STEPS } test_step;

typedef struct test_pair {
    char k[TEST_SPEC_BYTES], v[TEST_SPEC_BYTES];
    uint32_t head_dim;
    bool measured; /* speeds, too */
} test_pair;

typedef struct test_gpu test_gpu;

typedef struct test_device {
    test_gpu *gpu; /* NULL: a CPU level, or a GPU that could not be tried */
    bool is_gpu;
    int ordinal;                  /* of a GPU */
    kvant_cpu_level level;        /* of a CPU */
    char name[TEST_NAME_BYTES];   /* of the model: "AMD EPYC", "NVIDIA H100" */
    char label[TEST_NAME_BYTES];  /* for people: "CPU avx2", "GPU 0 NVIDIA H100" */
    char missing[TEST_WHY_BYTES]; /* why it could not be tried, or "" */
    /* GPUs only; 0: not known */
    int major, minor, multiprocessors, shared_bytes, l2_bytes, driver_cuda;
    double memory_bytes;
} test_device;

/* The speed of one layer on a device. */
typedef struct test_speed {
    uint32_t sequences, threads; /* 0 threads: a GPU */
    double bytes;                /* of all pages that attention reads */
    double encode_rows;          /* per second: keys and values of head_dim numbers */
    double attention;            /* seconds of one query token per sequence; 0: not measured */
    double copy;                 /* seconds for a copy of as many bytes */
} test_speed;

typedef struct test_result {
    const test_device *device;
    test_pair pair;
    test_state state[TEST_STEPS];
    double share[TEST_STEPS]; /* the largest error / bound; 0 of encoding */
    test_speed speed;
    char why[TEST_WHY_BYTES]; /* of the first state that is not right */
} test_result;

/* GPUs and CPUs have different arithmetic. */
typedef enum test_place { TEST_ON_GPU, TEST_ON_CPU } test_place;

/* The reference of one query head of one query token. */
typedef struct test_output {
    double lse;      /* without what a centre of keys adds to all scores */
    double center;   /* what it adds */
    double bound[2]; /* of the Euclidean length of an output's error; by test_place */
    double lse_bound[2];
} test_output;

/* A call of attention with n_queries query tokens, causal when there is more than one. Every
 * `step`-th query token has a reference: (i / step) x TEST_HEADS + head. */
typedef struct test_call {
    uint32_t n_queries, step;
    float *q;    /* n_queries x TEST_HEADS x head_dim; every number is exact in bf16 */
    double *out; /* references x head_dim */
    test_output *outputs;
} test_call;

typedef struct test_problem {
    test_pair pair;
    kvant_codec *codec[2][TEST_KV_HEADS]; /* by kvant_role and kv head */
    kvant_codec_info info[2];
    kvant_affine affine[2][TEST_KV_HEADS];
    float *rows[2];    /* TEST_ROWS x TEST_KV_HEADS x head_dim; exact in bf16 */
    float *decoded[2]; /* as rows: what portable C reads in the pages */
    uint8_t *pages;    /* TEST_BLOCKS blocks of portable C: pages of keys, then of values */
    size_t block_bytes;
    test_call calls[TEST_CALLS];
} test_problem;

/* *n pairs to try, which the caller frees; NULL without memory. only: a spec instead of all codecs.
 */
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

/* The offset of a page in the blocks of a problem. */
size_t test_page_at(const test_problem *p, kvant_role role, uint32_t block, uint32_t head);
/* Bytes of as many blocks as the keys and values of a sequence whose attention is measured. */
static inline double test_speed_bytes(const test_problem *p)
{
    return SPEED_TOKENS / 64 * (SPEED_KV_HEADS / TEST_KV_HEADS) * (double)p->block_bytes;
}
/* This CPU level writes rows into the pages, or reads rows in them. */
kvant_status test_convert(const test_problem *p, kvant_role role, bool encode, float *rows);
/* The nearest number towards 0 that bf16 has. */
float test_cut(double x);

/* These compare bytes of all pages, decoded rows, and the outputs of a call. Each notes in the
 * result the first page, row or query that is off. rounding: the output type's relative error.
 * centered: lse has the centre's part. */
void test_compare_pages(test_result *r, const test_problem *p, const uint8_t *pages);
void test_compare_rows(test_result *r, const test_problem *p, kvant_role role, const float *rows);
typedef struct test_outputs {
    const float *out, *lse;
    double rounding;
    test_place place;
    bool centered;
} test_outputs;
void test_compare_call(test_result *r, const test_problem *p, size_t call, const test_outputs *got);

/* Sets the state of a step to a worse one, and why if it is the first. */
void test_note(test_result *r, test_step step, test_state found, const char *format, ...);
/* The worst state of all steps. */
test_state test_state_of(const test_result *r);

/* Everything about one run. */
typedef struct test_report {
    test_device *devices;
    test_result *results;
    size_t n_devices, n_results;
    double seconds;
    uint32_t shared_kib; /* the limit of shared memory per thread block of GPUs; 0: none */
    bool interrupted, no_memory;
} test_report;

/* The CPU levels and GPUs of this machine, at most n; how many there are. */
size_t test_find_cpus(test_device *devices, size_t n);
size_t test_find_gpus(test_device *devices, size_t n);
void test_gpu_close(test_gpu *gpu);

void test_cpu_check(const test_device *device, const test_problem *p, test_result *r);
void test_gpu_check(test_gpu *gpu, const test_problem *p, test_result *r);

/* Measures r->speed, or notes why not. */
void test_cpu_speed(const test_device *device, const test_problem *p, test_result *r);
void test_gpu_speed(test_gpu *gpu, const test_problem *p, test_result *r);
/* Seconds of a call, in the shortest of some rounds: run makes `times` calls and waits for them. */
double test_time(bool (*run)(void *user, int times), void *user);

/* Whether everything that was tried is right, and everything was tried. */
bool test_all_right(const test_report *report);
/* The table, a line for each result that is not right, and the verdict, on stdout. False after
 * complaining that it cannot be printed. */
bool test_print(const test_report *report);
/* The file: one JSON object. */
void test_write_json(const test_report *report, FILE *out);
