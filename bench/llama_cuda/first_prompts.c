/* first_prompts.c - how a context's first prompt affects later answers on a GPU.
 *
 *     first_prompts LIBRARIES PLUGIN MODEL TEXT PIECES LOGITS [stays]
 *
 * A context answers two prompts of each piece of the text, after it had another first prompt. This
 * prompt is removed; with `stays` it remains in the cache, and the answers are another sequence.
 * PLUGIN "none": writes the logits of a context of llama.cpp's own without a first prompt to the
 * file LOGITS. Otherwise: prints for each kind of first prompt the mean divergence from these
 * logits, its ratio to the divergence after another text, and the ratio's standard error over the
 * pieces. Settings of the cache come from kvant's variables. */
#include <math.h>
#include <stdlib.h>

#include "plugin_model.h"

enum {
    N_TEXT = 1400,
    N_PROMPT = 600,
    N_LAST = 80,
    N_STEPS = 40,
    N_ANSWERS = 2,
    N_ROWS = N_ANSWERS * (N_LAST + N_STEPS),
    MOST_FIRST = 1200,
    MOST_PIECES = 64,
    MOST_BYTES = 1 << 20
};

typedef struct kind {
    const char *name, *word; /* word NULL: tokens of the text; "": in no order */
    int n;
    bool other; /* tokens of the text far from the piece */
    double kld[MOST_PIECES];
} kind;

enum { OTHER_TEXT };
static kind kinds[] = { { .name = "1200 tokens of another text", .n = 1200, .other = true },
                        { .name = "none" },
                        { .name = "ordinary text", .n = 200 },
                        { .name = "1200 tokens of ordinary text", .n = 1200 },
                        { .name = "200 tokens of \" the\"", .word = " the", .n = 200 },
                        { .name = "80 tokens of \"\\n\"", .word = "\n", .n = 80 },
                        { .name = "40 tokens of \"Hello\"", .word = "Hello", .n = 40 },
                        { .name = "200 tokens of \"0, \"", .word = "0, ", .n = 200 },
                        { .name = "70 tokens of \"ping\\n\"", .word = "ping\n", .n = 70 },
                        { .name = "1200 tokens of \" the\"", .word = " the", .n = 1200 },
                        { .name = "200 tokens in no order", .word = "", .n = 200 } };
enum { N_KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static bool stays; /* the first prompt stays in the cache */

static const struct llama_vocab *vocab;
static int n_vocab, n_tokens;
static llama_token *tokens;

static void fail(const char *what)
{
    fprintf(stderr, "first_prompts: %s failed\n", what);
    exit(1);
}

/* Decodes n tokens of a sequence from a position on. all: with the logits of the last tokens. */
static void decode(struct llama_context *context, const llama_token *from, int n, int position,
                   llama_seq_id sequence, bool all)
{
    for (int first = 0, some; first < n; first += some) {
        struct llama_batch batch;
        some = n - first < 512 ? n - first : 512;
        batch = llama_batch_init(some, 0, 1);
        for (int i = 0; i < some; i++) {
            batch.token[i] = from[first + i];
            batch.pos[i] = position + first + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = sequence;
            batch.logits[i] = all && first + i >= n - N_LAST;
        }
        batch.logits[some - 1] = 1;
        batch.n_tokens = some;
        if (llama_decode(context, batch) != 0)
            fail("decoding");
        llama_batch_free(batch);
    }
}

static void keep(struct llama_context *context, int i, float **to)
{
    memcpy(*to, llama_get_logits_ith(context, i), (size_t)n_vocab * sizeof(float));
    *to += n_vocab;
}

/* The logits of the ends of two prompts of a piece, and of the tokens after them. */
static void answers(struct llama_model *model, const llama_token *piece, const llama_token *first,
                    int n_first, float *logits)
{
    struct llama_context_params params = llama_context_default_params();
    struct llama_context *context;

    params.n_ctx = 2048;
    params.n_batch = params.n_ubatch = 512;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.n_seq_max = stays ? 2 : 1;
    params.kv_unified = stays;
    context = llama_init_from_model(model, params);
    if (context == NULL)
        fail("a context");
    if (n_first > 0)
        decode(context, first, n_first, 0, 0, false);
    for (int a = 0; a < N_ANSWERS; a++) {
        const llama_token *prompt = piece + a * (N_TEXT / 2);
        llama_memory_seq_rm(llama_get_memory(context), stays, -1, -1);
        decode(context, prompt, N_PROMPT, 0, stays, true);
        for (int i = 0; i < N_LAST; i++)
            keep(context, (N_PROMPT - 1) % 512 - N_LAST + 1 + i, &logits);
        for (int i = 0; i < N_STEPS; i++) {
            decode(context, prompt + N_PROMPT + i, 1, N_PROMPT + i, stays, false);
            keep(context, 0, &logits);
        }
    }
    llama_free(context);
}

static void read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    char *bytes = malloc(MOST_BYTES);

    tokens = malloc(MOST_BYTES * sizeof(*tokens));
    if (file == NULL || bytes == NULL || tokens == NULL)
        fail("reading the text");
    n_tokens = llama_tokenize(vocab, bytes, (int32_t)fread(bytes, 1, MOST_BYTES, file), tokens,
                              MOST_BYTES, false, false);
    fclose(file);
    free(bytes);
}

static void fill(const kind *k, const llama_token *piece, llama_token *first)
{
    llama_token word[8];
    int n = 0;

    if (k->word != NULL && k->word[0] != 0)
        n = llama_tokenize(vocab, k->word, (int32_t)strlen(k->word), word, 8, false, false);
    for (int i = 0; i < k->n; i++)
        first[i] = n > 0             ? word[i % n]
                   : k->word != NULL ? (i * 7919 + 13) % (n_vocab - 200) + 100
                   : k->other        ? tokens[(piece - tokens + n_tokens / 2 + i) % n_tokens]
                                     : piece[(i + 100) % N_TEXT];
}

static double log_of_sum(const float *logits)
{
    double sum = 0;

    for (int i = 0; i < n_vocab; i++)
        sum += exp(logits[i]);
    return log(sum);
}

static double divergence(const float *stock, const float *ours)
{
    double all = 0;

    for (int row = 0; row < N_ROWS; row++, stock += n_vocab, ours += n_vocab) {
        const double a = log_of_sum(stock), b = log_of_sum(ours);
        for (int i = 0; i < n_vocab; i++)
            all += exp(stock[i] - a) * ((stock[i] - a) - (ours[i] - b));
    }
    return all / N_ROWS;
}

static double mean(const double *x, int n)
{
    double sum = 0;

    for (int i = 0; i < n; i++)
        sum += x[i] / n;
    return sum;
}

/* The standard error of the ratio of two means over the same pieces. */
static double error_of_ratio(const double *above, const double *below, int n)
{
    const double ratio = mean(above, n) / mean(below, n);
    double sum = 0;

    for (int i = 0; i < n; i++)
        sum += pow(above[i] - ratio * below[i], 2);
    return sqrt(sum / n / (n - 1)) / mean(below, n);
}

static void print_kinds(int n_pieces)
{
    const double *other = kinds[OTHER_TEXT].kld;

    for (int k = 0; k < N_KINDS; k++)
        printf("%-30s %.5f %.3f +- %.3f\n", kinds[k].name, mean(kinds[k].kld, n_pieces),
               mean(kinds[k].kld, n_pieces) / mean(other, n_pieces),
               error_of_ratio(kinds[k].kld, other, n_pieces));
}

static void compare(struct llama_model *model, FILE *file, int n_pieces, float *stock, float *ours)
{
    llama_token first[MOST_FIRST];

    for (int p = 0; p < n_pieces; p++) {
        const llama_token *piece = tokens + (size_t)p * (size_t)(n_tokens / n_pieces);
        if (fread(stock, sizeof(float), (size_t)N_ROWS * n_vocab, file) != (size_t)N_ROWS * n_vocab)
            fail("reading logits");
        for (int k = 0; k < N_KINDS; k++) {
            fill(&kinds[k], piece, first);
            answers(model, piece, first, kinds[k].n, ours);
            kinds[k].kld[p] = divergence(stock, ours);
        }
    }
    print_kinds(n_pieces);
}

int main(int argc, char **argv)
{
    const bool writes = argc > 2 && strcmp(argv[2], "none") == 0;
    struct llama_model *model;
    float *stock, *ours;
    FILE *file;
    int n_pieces;

    stays = argc == 8 && strcmp(argv[7], "stays") == 0;
    if ((argc != 7 && !stays) || (n_pieces = atoi(argv[5])) < 2 || n_pieces > MOST_PIECES)
        return 2;
    model = load_model(argv[1], argv[2], argv[3]);
    vocab = llama_model_get_vocab(model);
    n_vocab = llama_vocab_n_tokens(vocab);
    read_text(argv[4]);
    if (n_tokens < n_pieces * N_TEXT)
        fail("a text of that length");
    stock = malloc((size_t)N_ROWS * n_vocab * sizeof(*stock));
    ours = malloc((size_t)N_ROWS * n_vocab * sizeof(*ours));
    file = fopen(argv[6], writes ? "wb" : "rb");
    if (stock == NULL || ours == NULL || file == NULL)
        fail("memory, or opening the logits");
    for (int p = 0; p < n_pieces && writes; p++) {
        answers(model, tokens + (size_t)p * (size_t)(n_tokens / n_pieces), NULL, 0, ours);
        if (fwrite(ours, sizeof(float), (size_t)N_ROWS * n_vocab, file) != (size_t)N_ROWS * n_vocab)
            fail("writing logits");
    }
    if (!writes)
        compare(model, file, n_pieces, stock, ours);
    fclose(file);
    free(stock);
    free(ours);
    free(tokens);
    llama_model_free(model);
    return 0;
}
