/* test_cuda_attention.c - decode attention: every kind of code and every pair of them, shapes,
 * lengths, exact pages. The file attention_bound.c has the reference and derives the bound. */
#include "attention_fixture.h"

#include "../../src/cuda/params.h"

static const int32_t odd_lengths[] = { 1, 0, 64, 63, 65, 200, -3, 1000, 7, 129 };
static const int32_t one_long[] = { 12345 };
static const int32_t one_token[] = { 1 };
static const int32_t empties[] = { 0, 0, 0 };

CASE(test_codecs)
{
    static const char *const specs[] = { "int-4",
                                         "int-4:sym",
                                         "int-8",
                                         "int-8:sym",
                                         "bdr-4",
                                         "bdr-4:block=16",
                                         "turboquant-2:rotate=hadamard",
                                         "turboquant-3:rotate=hadamard",
                                         "turboquant-4:rotate=hadamard",
                                         "turboquant-4:scale=norm,rotate=none" };
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 4; i++) {
            attention_case c = { specs[s],
                                 specs[s],
                                 dims[i],
                                 2,
                                 8,
                                 10,
                                 (kvant_cuda_type)((s + i) % 3),
                                 odd_lengths,
                                 i % 2 == 1,
                                 s % 2 ? 1.0f : 0.3f,
                                 0 };
            run_attention(&c);
        }
}

/* Keys of one kind with values of a second kind: every pair that the library has besides the pairs
 * above. */
CASE(test_mixed_codecs)
{
    static const char *const keys[] = { "int-8", "int-4", "turboquant-4:rotate=hadamard",
                                        "turboquant-3:rotate=hadamard",
                                        "turboquant-2:rotate=hadamard" };
    static const char *const values[] = { "int-8:sym", "bdr-4", "turboquant-4:rotate=none",
                                          "turboquant-3:rotate=hadamard",
                                          "turboquant-2:rotate=hadamard" };
    static const uint32_t dims[] = { 128, 64, 256, 96 };
    size_t n = 0;
    for (size_t k = 0; k < 5; k++)
        for (size_t v = 0; v < 5; v++) {
            attention_case c = {
                keys[k],     values[v],  dims[n % 4], 2, 6, 10, (kvant_cuda_type)(n % 3),
                odd_lengths, n % 2 == 0, 1.0f,        0
            };
            if (v >= k || (k == 2 && v == 1)) { /* values have no more bits than keys */
                run_attention(&c);
                n++;
            }
        }
    assert_int_equal(n, 16);
}

/* Exact pages next to sealed pages, and only exact pages; kinds with groups, with and without exact
 * pages. */
CASE(test_open_pages)
{
    static const struct {
        const char *k, *v;
    } specs[] = { { "turboquant-4:rotate=hadamard", "turboquant-3:rotate=hadamard" },
                  { "int-4", "int-4" },
                  { "int-8:sym", "bdr-8" },
                  { "turboquant-2:rotate=hadamard", "turboquant-2:rotate=hadamard" },
                  { "int-2", "int-2:sym" },
                  { "int-3:sym", "int-3" },
                  { "int-4", "int-2" },
                  { "kivi-2", "kivi-2" },
                  { "int-2:group=32,axis=channel,sym", "int-2:group=32,sym" },
                  { "innerq-base", "innerq-base" },
                  { "innerq-small", "innerq-small" },
                  { "int-3:group=32", "int-3:group=32,axis=channel" },
                  { "kivi-4", "kivi-4" },
                  { "int-4:group=16", "int-4:group=64" },
                  { "int-4:group=128", "bdr-4:group=16" },
                  { "int-4:group=16,axis=channel", "int-4:group=64,axis=channel" },
                  { "int-4:group=64,axis=channel,sym", "int-4:group=16,axis=channel,hybrid=code" },
                  { "kivi-2:group=64", "kivi-2:group=64" },
                  { "int-8:group=64", "int-8:group=32,sym" },
                  { "int-3:group=64", "int-3:group=32,hybrid" },
                  { "int-2:group=32", "int-2:group=64,sym" },
                  { "int-4:group=32,hybrid", "int-4:group=16,hybrid" },
                  { "innerq-hybrid", "innerq-hybrid" } };
    static const uint32_t dims[] = { 64, 96, 128, 256 }, open[] = { 3, 0, 1 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 4; i++) {
            attention_case c = { specs[s].k,
                                 specs[s].v,
                                 dims[i],
                                 2,
                                 s % 2 ? 8 : 6,
                                 10,
                                 (kvant_cuda_type)((s + i) % 3),
                                 odd_lengths,
                                 i % 2 == 0,
                                 s % 2 ? 1.0f : 0.3f,
                                 open[(s + i) % 3] };
            run_attention(&c);
            c.open = c.open == 3 ? 0 : 3;
            run_attention(&c);
        }
    attention_case c = {
        "kivi-2", "kivi-2", 128, 2, 8, 1, KVANT_CUDA_F32, one_long, false, 0.5f, 20
    };
    run_attention(&c);
    c.k_spec = c.v_spec = "turboquant-4";
    run_attention(&c);
}

/* Codes of several channels, each with and without exact pages. */
CASE(test_chunks)
{
    static const char *const specs[] = {
#if KVANT_PAPERS /* sizes that are no constants of a kernel */
        "octopus-5:rotate=hadamard",
        "octopus-4:split=7.1,rotate=hadamard",
        "octopus-3:split=4.3,rotate=none",
        "hqmq-s341r6",
        "hqmq-s42r4:rotate=hadamard",
        "hqmq-s170r7",
        "addvq-k24r3",
        "hqmq-s341r6:med3",
#endif
        "octopus-2:rotate=hadamard",
        "octopus-3:rotate=hadamard",
        "octopus-4:rotate=hadamard",
        "hqmq-s96r4",
        "hqmq-s192r6",
        "octopus-4:rotate=none,scale=norm",
        "hqmq-s96r4:rotate=hadamard,scale=norm,book=random"
    };
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++)
        for (size_t i = 0; i < 4; i++)
            for (uint32_t open = 0; open < 4; open += 3) {
                attention_case c = { specs[s],
                                     specs[s],
                                     dims[i],
                                     2,
                                     s % 2 ? 8 : 6,
                                     10,
                                     (kvant_cuda_type)((s + i) % 3),
                                     odd_lengths,
                                     i % 2 == 1,
                                     s % 2 ? 1.0f : 0.3f,
                                     open };
                run_attention(&c);
            }
    for (size_t s = 0; s < 5; s++) {
        attention_case c = { specs[s],       specs[s], 128,   2,    8, 1,
                             KVANT_CUDA_F32, one_long, false, 0.5f, 20 };
        run_attention(&c);
    }
}

/* Every pair of a trellis, each with and without exact pages. */
CASE(test_trellis)
{
    static const char *const specs[] = { "trellis-2:rotate=hadamard", "trellis-3:rotate=hadamard",
                                         "trellis-4:rotate=hadamard",
                                         "trellis-4:rotate=none,scale=norm" };
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    for (size_t k = 0; k < 4; k++)
        for (size_t v = 0; v <= k; v++)
            for (size_t i = 0; i < 4; i++)
                for (uint32_t open = 0; open < 4; open += 3) {
                    attention_case c = { specs[k],
                                         specs[v],
                                         dims[i],
                                         2,
                                         k % 2 ? 8 : 6,
                                         10,
                                         (kvant_cuda_type)((k + v + i) % 3),
                                         odd_lengths,
                                         (i + v) % 2 == 1,
                                         v % 2 ? 1.0f : 0.3f,
                                         open };
                    run_attention(&c);
                }
    for (size_t s = 0; s < 3; s++) {
        attention_case c = { specs[s],       specs[s], 128,   2,    8, 1,
                             KVANT_CUDA_F32, one_long, false, 0.5f, 20 };
        run_attention(&c);
    }
}

/* Keys of 6 bits with values of 4 bits: the pairs of the preset "quality" and of vLLM's
 * kvant_fast. */
CASE(test_wide_keys)
{
    static const char *const keys[] = { "turboquant-6:rotate=hadamard",
                                        "turboquant-6:rotate=none,scale=norm" };
    static const char *const values[] = { "trellis-4:rotate=hadamard",
                                          "turboquant-4:rotate=hadamard" };
    static const uint32_t dims[] = { 64, 96, 128, 256 };
    for (size_t k = 0; k < 4; k++)
        for (size_t i = 0; i < 4; i++)
            for (uint32_t open = 0; open < 4; open += 3) {
                attention_case c = { keys[k % 2],
                                     values[k / 2],
                                     dims[i],
                                     2,
                                     k % 2 ? 8 : 6,
                                     10,
                                     (kvant_cuda_type)((k + i) % 3),
                                     odd_lengths,
                                     (i + k) % 2 == 1,
                                     k % 2 ? 1.0f : 0.3f,
                                     open };
                run_attention(&c);
            }
    for (size_t v = 0; v < 2; v++) {
        attention_case c = { keys[0],        values[v], 128,   2,    8, 1,
                             KVANT_CUDA_F32, one_long,  false, 0.5f, 20 };
        run_attention(&c);
    }
}

CASE(test_head_groups)
{
    static const uint32_t groups[] = { 1, 2, 3, 5, 7, 8, 9, 12, 16 };
    for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
        attention_case c = {
            "turboquant-4",  "turboquant-4", 128,  3, 3 * groups[i], 4, KVANT_CUDA_F32,
            odd_lengths + 4, false,          0.5f, 0
        };
        run_attention(&c);
    }
}

CASE(test_shapes)
{
    static int32_t many[300];
    for (int i = 0; i < 300; i++)
        many[i] = (int32_t)(random_bits() % 150);
    const attention_case cases[] = {
        { "int-4", "int-4", 128, 2, 14, 1, KVANT_CUDA_F16, one_long, false, 1.0f, 0 },
        { "turboquant-4", "turboquant-4", 128, 1, 8, 1, KVANT_CUDA_BF16, one_long, true, 0.2f, 0 },
        { "turboquant-4", "turboquant-4", 256, 1, 4, 1, KVANT_CUDA_BF16, one_long, false, 1.0f, 0 },
        { "int-8", "int-8", 64, 1, 3, 1, KVANT_CUDA_F32, one_long, false, 0.1f, 0 },
        { "turboquant-4", "turboquant-4", 128, 2, 4, 1, KVANT_CUDA_F32, one_token, false, 1.0f, 0 },
        { "int-4", "int-4", 128, 2, 4, 3, KVANT_CUDA_F32, empties, false, 1.0f, 0 },
        { "int-4", "int-4", 128, 2, 6, 300, KVANT_CUDA_F32, many, true, 1.0f, 0 },
        { "int-4:sym", "bdr-4", 128, 2, 8, 10, KVANT_CUDA_F32, odd_lengths, false, 1.0f, 0 },
        { "turboquant-4:scale=norm", "turboquant-4:rotate=none", 128, 2, 8, 10, KVANT_CUDA_F32,
          odd_lengths, false, 1.0f, 0 },
        { "turboquant-4", "turboquant-4", 128, 2, 8, 10, KVANT_CUDA_F32, odd_lengths, false, 20.0f,
          0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        run_attention(&cases[i]);
}

/* Two sequences that share their blocks (a common prefix), and a length beyond the table, which is
 * cut. */
CASE(test_shared_blocks)
{
    static const int32_t lengths[] = { 200, 200 };
    attention_case c = { "turboquant-4", "turboquant-4", 128,   2,    8, 2,
                         KVANT_CUDA_F32, lengths,        false, 1.0f, 0 };
    fixture f;
    fixture_open(&f, &c, NULL);
    memcpy(f.table + f.blocks_per_row, f.table, f.blocks_per_row * sizeof *f.table);
    check_cuda(cudaMemcpy(f.gpu_table, f.table, 2 * f.blocks_per_row * sizeof *f.table,
                          cudaMemcpyHostToDevice));
    memcpy(f.q + (size_t)c.n_heads * 128, f.q, (size_t)c.n_heads * 128 * sizeof(float));
    check_cuda(cudaMemcpy(f.gpu_q, f.q, f.q_bytes, cudaMemcpyHostToDevice));
    int32_t beyond[] = { 192, 1 << 30 };
    kvant_cuda_kernel_attention_args args = attention_args(&f);
    args.blocks_per_row = 3; /* of 4: the second length is cut to 192 */
    check_cuda(cudaMemcpy(f.gpu_lengths, beyond, sizeof beyond, cudaMemcpyHostToDevice));
    assert_int_equal(kvant_cuda_kernel_attention(&args, NULL), KVANT_OK);
    float *out = malloc(f.out_bytes);
    device_read(out, f.gpu_out, f.out_bytes);
    static const int32_t cut[] = { 192, 192 };
    c.lengths = cut;
    float lse[16];
    device_read(lse, f.gpu_lse, sizeof lse);
    for (uint32_t b = 0; b < 2; b++)
        for (uint32_t h = 0; h < c.n_heads; h++)
            check_head(&f, out, lse, b, 0, h);
    free(out);
    fixture_close(&f);
}

/* More pairs of a sequence and a kv head than multiprocessors: a thread block ends one pair and
 * begins another one, and two thread blocks may share a multiprocessor. */
CASE(test_many_sequences)
{
    static const char *const specs[] = { "trellis-4:rotate=hadamard", "int-4" };
    enum { MANY = 64 };
    int32_t lengths[2][MANY];
    for (int i = 0; i < MANY; i++)
        lengths[0][i] = 321, lengths[1][i] = odd_lengths[i % 10];
    for (int i = 0; i < 8; i++) {
        attention_case c = { specs[i / 4],
                             specs[i / 4],
                             128,
                             8,
                             16,
                             MANY,
                             KVANT_CUDA_F16,
                             lengths[i % 2],
                             false,
                             0.5f,
                             i / 2 % 2 ? 3u : 0u };
        run_attention(&c);
    }
}

RUN_CASES_ON_GPU(NULL, NULL)
