/* Attention over rows that an engine stores in its own way: ggml's q8_0 rows, and latent rows
 * (MLA), computed on threads that the program lends.
 *
 *     cc rows.c $(pkg-config --cflags --libs kvant) -lm -o rows && ./rows
 */
#include <kvant/block_attention.h>
#include <kvant/executor.h>

#include <math.h>

#include "example.h"

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, TOKENS = 128, LATENT = 128, PARTS = 3 };

/* A program gives each of its threads a call of work; this program has one thread. */
static void run(void *context, uint32_t n_workers, kvant_executor_work work, void *loop)
{
    *(unsigned *)context += n_workers > 0;
    work(loop, 0);
}

static kvant_attention_problem problem_of(float *q, float *out, uint32_t q_dim, uint32_t out_dim)
{
    return (kvant_attention_problem){ .size = sizeof(kvant_attention_problem),
                                      .n_queries = 1,
                                      .n_tokens = TOKENS,
                                      .n_heads = HEADS,
                                      .n_threads = 2,
                                      .q = q,
                                      .q_token_stride = (size_t)HEADS * q_dim,
                                      .q_head_stride = q_dim,
                                      .out = out,
                                      .out_token_stride = (size_t)HEADS * out_dim,
                                      .out_head_stride = out_dim,
                                      .scale = 1 / sqrtf((float)q_dim),
                                      .causal = true };
}

/* Rows of q8_0: a block of 32 numbers is an fp16 scale and 32 signed bytes. */
static float attend_blocks(void)
{
    const size_t row = kvant_block_row_bytes(KVANT_BLOCK_Q8_0, DIM),
                 bytes = TOKENS * KV_HEADS * row;
    const uint16_t one = 0x3c00; /* the scale 1 as fp16 */
    unsigned char *data = zeroed(bytes);
    for (size_t i = 0; i < bytes; i += 34) {
        memcpy(data + i, &one, sizeof one);
        memset(data + i + 2, (int)(i / 34 % 3), 32);
    }
    const kvant_block_rows rows = { .size = sizeof rows,
                                    .type = KVANT_BLOCK_Q8_0,
                                    .head_dim = DIM,
                                    .n_kv_heads = KV_HEADS,
                                    .data = data,
                                    .bytes = bytes,
                                    .token_stride = KV_HEADS * row,
                                    .head_stride = row };
    float *q = random_numbers(HEADS * DIM), out[HEADS * DIM];
    const kvant_attention_problem problem = problem_of(q, out, DIM, DIM);
    size_t needed;
    check(kvant_block_attention_workspace(&rows, &rows, &problem, &needed));
    void *workspace = zeroed(needed);
    check(kvant_block_attention(&rows, &rows, &problem, workspace, needed));
    free(workspace), free(data), free(q);
    return out[0];
}

/* Latent rows: keys are whole rows, values their first LATENT numbers. A row is PARTS parts of DIM,
 * each with its codec. */
static float attend_latents(void)
{
    kvant_codec *codec;
    check(kvant_codec_create("int-8", DIM, KVANT_ROLE_V, 0, &codec, NULL, 0));
    const kvant_codec *const codecs[PARTS] = { codec, codec, codec };
    const kvant_tensor_params params = { .size = sizeof params,
                                         .codecs = codecs,
                                         .n_kv_heads = PARTS,
                                         .n_sequences = 1,
                                         .n_blocks = TOKENS / 64,
                                         .blocks_per_sequence = TOKENS / 64 };
    kvant_tensor *tensor;
    size_t bytes, needed;
    check(kvant_tensor_size(&params, &bytes));
    void *memory = zeroed(bytes);
    check(kvant_tensor_create(&params, memory, &tensor));
    float *rows = random_numbers(TOKENS * PARTS * DIM), *q = random_numbers(HEADS * PARTS * DIM);
    float out[HEADS * LATENT];
    int64_t slots[TOKENS];
    for (int i = 0; i < TOKENS; i++)
        slots[i] = i;
    check(kvant_tensor_write(tensor, slots, TOKENS, rows, PARTS * DIM, 1));
    const kvant_attention_problem problem = problem_of(q, out, PARTS * DIM, LATENT);
    check(kvant_latent_attention_workspace(tensor, LATENT, &problem, &needed));
    void *workspace = zeroed(needed);
    check(kvant_latent_attention(tensor, LATENT, &problem, workspace, needed));
    kvant_tensor_free(&tensor);
    kvant_codec_free(&codec);
    free(workspace), free(memory), free(rows), free(q);
    return out[0];
}

int main(void)
{
    unsigned loops = 0;
    const kvant_executor lender = { .run = run, .context = &loops };
    const kvant_executor *former = kvant_use_executor(&lender);
    const float blocks = attend_blocks(), latents = attend_latents();
    kvant_use_executor(former);
    printf("q8_0 rows %.3f, latent rows %.3f, %s\n", blocks, latents,
           loops > 0 ? "on lent threads" : "on one thread");
    return 0;
}
