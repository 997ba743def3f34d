/* attention_fixture.h - decode attention on the GPU against a softmax in double precision over the
 * rows that the CPU decodes. It has a paged cache with queries, the reference with its derived
 * bound, and a run that checks every head. */
#ifndef KVANT_TESTS_ATTENTION_FIXTURE_H
#define KVANT_TESTS_ATTENTION_FIXTURE_H

#include "block_centers.h"

enum { MAX_D = 512 };

typedef struct attention_case {
    const char *k_spec, *v_spec;
    uint32_t head_dim, n_kv_heads, n_heads, batch;
    kvant_cuda_type type;
    const int32_t *lengths;
    bool center;    /* values have a centre, keys and values a scale */
    float key_size; /* sharpness of the softmax */
    uint32_t
        open; /* 0: no exact blocks; 1: all; n: about one in n, and the last of every sequence */
} attention_case;

/* Further options of a problem. All zeros: one query token per sequence, which sees the whole
 * sequence. */
typedef struct attention_problem {
    uint32_t query_tokens;  /* at most, per sequence; 0: 1 */
    const uint32_t *counts; /* query tokens of each sequence, or NULL: all have query_tokens */
    bool causal;
    uint32_t window;
    float softcap, max_bias;
    bool mask, sinks;
    bool scratch;      /* room for the unpacked pages of two kv heads */
    bool no_blocks;    /* every block is hidden */
    uint32_t matrices; /* number of random key matrices, which change after some blocks; 0: none */
    bool key_center;   /* each matrix has a centre */
    /* every page has its own centre, for queries before any matrix; not together with key_center */
    bool page_centers;
    bool hidden; /* hides one of four pages, among them exact blocks; their offsets are NaN */
} attention_problem;

typedef struct fixture {
    const attention_case *c;
    attention_problem p;
    uint32_t n_rows, mask_stride, n_matrices;
    uint8_t *matrices; /* laid out as table; NULL: there is one matrix */
    uint8_t q_ids[KVANT_CUDA_MOST_MATRICES];
    float *k_center;
    void *gpu_matrices, *gpu_k_center;
    test_block_centers_of block_centers; /* centres of pages */
    /* queries before any matrix; NULL: pages have no centres */
    float *plain_q;
    void *gpu_offsets;                          /* output of kvant_cuda_page_offsets */
    size_t offset_bytes;                        /* of gpu_offsets */
    kvant_cuda_page_offsets_args plain_queries; /* arguments that made gpu_offsets */
    /* laid out as table, which still names the hidden blocks; NULL: none is hidden */
    bool *hidden;
    int32_t *starts;
    uint16_t *mask;
    float *sinks;
    void *gpu_starts, *gpu_mask, *gpu_sinks;
    test_cache cache;
    test_open_pool open;
    uint32_t blocks_per_row;
    int32_t *table;
    float *q, *center, *k_scale, *v_scale; /* q: queries for each matrix */
    void *gpu_q, *gpu_out, *gpu_table, *gpu_lengths, *gpu_center, *gpu_k_scale, *gpu_v_scale,
        *workspace;
    float *gpu_lse;
    size_t q_bytes, out_bytes, workspace_bytes;
    double query_error;  /* error that the numbers of queries have already */
    double output_error; /* error that outputs get afterwards, relative to their length */
    double worst;        /* error / bound */
    /* the CPU's rows, for each role, sequence and kv head: attention_bound.c */
    struct decoded_rows *decoded;
} fixture;

typedef struct located {
    const kvant_codec *codec;
    void *page;
    bool open;
} located;

/* p: NULL for a problem without options. */
void fixture_open(fixture *f, const attention_case *c, const attention_problem *p);
void fixture_close(fixture *f);
/* Frees the decoded rows: after a change of the pages or lengths of an open fixture. */
void forget_rows(fixture *f);
/* Returns the page of sequence b that holds token t. */
located locate(const fixture *f, kvant_role role, uint32_t b, int32_t t, uint32_t kv_head);

/* The query row of a sequence's token, and the position of this token in the sequence. */
uint32_t row_of(const fixture *f, uint32_t b, uint32_t token);
int32_t position_of(const fixture *f, uint32_t b, uint32_t token);
uint32_t query_tokens_of(const fixture *f, uint32_t b);
uint32_t matrix_of(const fixture *f, uint32_t b, int32_t t);
float slope_of(const fixture *f, uint32_t head);

/* Softmax in double precision, and how far the GPU may be from it (L2 norm of out). */
typedef struct reference {
    double out[MAX_D], lse, bound, lse_bound;
} reference;

void compute_reference(fixture *f, uint32_t b, uint32_t token, uint32_t head, reference *r);

/* Checks one query row's output and log-sum-exp (NULL: not checked) against the bound of
 * attention_bound.c. */
void check_head(fixture *f, const void *out, const float *lse, uint32_t b, uint32_t token,
                uint32_t head);

kvant_cuda_kernel_attention_args attention_args(const fixture *f);

/* Runs once and checks every query row. Then replays a graph three times into poisoned outputs,
 * which must get the same bytes, although the graph does not wait for other calls. */
void run_attention(const attention_case *c);
void run_problem(const attention_case *c, const attention_problem *p);

#endif
