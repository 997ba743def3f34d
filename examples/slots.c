/* An engine that manages its own blocks: it decides which token goes to which slot, and gives
 * attention a block table.
 *
 *     cc slots.c $(pkg-config --cflags --libs kvant) -lm -o slots && ./slots
 *
 * One layer and one sequence. A block holds 64 tokens; slot 64 b + i is the place of the i-th token
 * of block b. */
#include <kvant/attention.h>
#include <kvant/scheme.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 8, KV_HEADS = 2, HEAD_DIM = 128, ROW = KV_HEADS * HEAD_DIM };
enum { BLOCKS = 16, TOKENS = 300 };

/* The blocks of the sequence, in no order: a pool gave them as they became free. */
static const int32_t table[] = { 7, 2, 11, 0, 5 };

static void check(kvant_status status)
{
    if (status != KVANT_OK) {
        fprintf(stderr, "%s\n", kvant_error_message());
        exit(1);
    }
}

static float *random_numbers(size_t n)
{
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; x != NULL && i < n; i++)
        x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
    return x;
}

/* The keys or the values of the layer, in zeroed memory of the engine. */
static kvant_tensor *make_tensor(kvant_scheme *scheme, kvant_role role, void **memory)
{
    const kvant_scheme_location place = { .size = sizeof place,
                                          .role = role,
                                          .n_layers = 1,
                                          .n_kv_heads = KV_HEADS,
                                          .head_dim = HEAD_DIM };
    kvant_tensor_params params = {
        .size = sizeof params, .n_kv_heads = KV_HEADS, .n_sequences = 1, .n_blocks = BLOCKS
    };
    check(kvant_scheme_codecs(scheme, &place, &params.codecs));

    size_t bytes;
    check(kvant_tensor_size(&params, &bytes));
    const size_t rounded = (bytes + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN;
    *memory = aligned_alloc(KVANT_PAGE_ALIGN, rounded);
    if (*memory == NULL)
        exit(1);
    memset(*memory, 0, rounded);

    kvant_tensor *tensor;
    check(kvant_tensor_create(&params, *memory, &tensor));
    for (uint32_t i = 0; i < sizeof table / sizeof *table; i++) /* the i-th block of sequence 0 */
        check(kvant_tensor_assign(tensor, (uint32_t)table[i], 0, i));
    return tensor;
}

/* The largest difference to attention on the numbers before they were compressed, over the largest
 * output. */
static double error(const float *q, const float *k, const float *v, const float *out)
{
    double worst = 0, largest = 0;
    for (int h = 0; h < HEADS; h++) {
        const int at = h / (HEADS / KV_HEADS) * HEAD_DIM;
        double sum = 0, exact[HEAD_DIM] = { 0 };
        for (int t = 0; t < TOKENS; t++) {
            double score = 0;
            for (int c = 0; c < HEAD_DIM; c++)
                score += (double)q[h * HEAD_DIM + c] * k[t * ROW + at + c];
            const double weight = exp(score / sqrt(HEAD_DIM));
            sum += weight;
            for (int c = 0; c < HEAD_DIM; c++)
                exact[c] += weight * v[t * ROW + at + c];
        }
        for (int c = 0; c < HEAD_DIM; c++) {
            worst = fmax(worst, fabs(exact[c] / sum - out[h * HEAD_DIM + c]));
            largest = fmax(largest, fabs(exact[c] / sum));
        }
    }
    return worst / largest;
}

int main(void)
{
    kvant_scheme *scheme;
    const kvant_scheme_params params = { .size = sizeof params, .preset = "balanced" };
    check(kvant_scheme_create(&params, &scheme));
    void *k_memory, *v_memory;
    kvant_tensor *k = make_tensor(scheme, KVANT_ROLE_K, &k_memory);
    kvant_tensor *v = make_tensor(scheme, KVANT_ROLE_V, &v_memory);

    float *k_rows = random_numbers(TOKENS * ROW), *v_rows = random_numbers(TOKENS * ROW);
    float *q = random_numbers(HEADS * HEAD_DIM);
    float out[HEADS * HEAD_DIM];
    if (k_rows == NULL || v_rows == NULL || q == NULL)
        return 1;
    int64_t slots[TOKENS];
    for (int t = 0; t < TOKENS; t++)
        slots[t] = 64 * table[t / 64] + t % 64;
    check(kvant_tensor_write(k, slots, TOKENS, k_rows, ROW, 1));
    check(kvant_tensor_write(v, slots, TOKENS, v_rows, ROW, 1));

    /* One query token, the newest. */
    const kvant_attention_problem problem = {
        .size = sizeof problem,
        .n_queries = 1,
        .n_tokens = TOKENS,
        .n_heads = HEADS,
        .block_table = table,
        .n_threads = 1,
        .q = q,
        .q_token_stride = HEADS * HEAD_DIM,
        .q_head_stride = HEAD_DIM,
        .out = out,
        .out_token_stride = HEADS * HEAD_DIM,
        .out_head_stride = HEAD_DIM,
        .scale = 1 / sqrtf(HEAD_DIM),
        .causal = true,
    };
    size_t bytes;
    check(kvant_attention_workspace(k, v, &problem, &bytes));
    void *workspace = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (workspace == NULL)
        return 1;
    check(kvant_attention(k, v, &problem, workspace, bytes));

    kvant_tensor_info info = { .size = sizeof info };
    check(kvant_tensor_get_info(k, &info));
    const double bits = 8.0 * (double)info.sealed_bytes / (64 * ROW);
    printf("%d tokens in %zu blocks: %.2f bits per number, error %.3f\n", TOKENS,
           info.written_blocks, bits, error(q, k_rows, v_rows, out));

    free(workspace);
    kvant_tensor_free(&k);
    kvant_tensor_free(&v);
    kvant_scheme_free(&scheme);
    free(k_memory), free(v_memory), free(k_rows), free(v_rows), free(q);
    return 0;
}
