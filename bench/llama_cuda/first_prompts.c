/* first_prompts.c - how a context's first prompt affects later answers on a GPU.
 *
 *     first_prompts LIBRARIES PLUGIN MODEL TEXT PIECES LOGITS
 *
 * A context answers two prompts of each piece of the text, after it had another first prompt, which
 * is removed. PLUGIN "none": writes the logits of a context of llama.cpp's own without a first
 * prompt to the file LOGITS. Otherwise: prints the mean divergence from these logits for each kind
 * of first prompt. Settings of the cache come from kvant's variables. */
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
    MOST_BYTES = 1 << 20
};

typedef struct kind {
    const char *name, *word; /* word NULL: tokens of the text, or in no order */
    int n;
    double sum;
} kind;

static kind kinds[] = { { "none", NULL, 0, 0 },
                        { "ordinary text", NULL, 200, 0 },
                        { "1200 tokens of ordinary text", NULL, 1200, 0 },
                        { "200 tokens of \" the\"", " the", 200, 0 },
                        { "80 tokens of \"\\n\"", "\n", 80, 0 },
                        { "40 tokens of \"Hello\"", "Hello", 40, 0 },
                        { "200 tokens of \"0, \"", "0, ", 200, 0 },
                        { "70 tokens of \"ping\\n\"", "ping\n", 70, 0 },
                        { "1200 tokens of \" the\"", " the", 1200, 0 },
                        { "200 tokens in no order", "", 200, 0 } };
enum { N_KINDS = sizeof(kinds) / sizeof(kinds[0]) };

static const struct llama_vocab *vocab;
static int n_vocab, n_tokens;
static llama_token *tokens;

static void fail(const char *what)
{
    fprintf(stderr, "first_prompts: %s failed\n", what);
    exit(1);
}

/* Decodes n tokens from a position on. all: with the logits of each token. */
static void decode(struct llama_context *context, const llama_token *from, int n, int position,
                   bool all)
{
    for (int first = 0, some; first < n; first += some) {
        struct llama_batch batch;
        some = n - first < 512 ? n - first : 512;
        batch = llama_batch_init(some, 0, 1);
        for (int i = 0; i < some; i++) {
            batch.token[i] = from[first + i];
            batch.pos[i] = position + first + i;
            batch.n_seq_id[i] = 1;
            batch.seq_id[i][0] = 0;
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
    context = llama_init_from_model(model, params);
    if (context == NULL)
        fail("a context");
    if (n_first > 0)
        decode(context, first, n_first, 0, false);
    for (int a = 0; a < N_ANSWERS; a++) {
        const llama_token *prompt = piece + a * (N_TEXT / 2);
        llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
        decode(context, prompt, N_PROMPT, 0, true);
        for (int i = 0; i < N_LAST; i++)
            keep(context, (N_PROMPT - 1) % 512 - N_LAST + 1 + i, &logits);
        for (int i = 0; i < N_STEPS; i++) {
            decode(context, prompt + N_PROMPT + i, 1, N_PROMPT + i, false);
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
            kinds[k].sum += divergence(stock, ours) / n_pieces;
        }
    }
    for (int k = 0; k < N_KINDS; k++)
        printf("%-30s %.5f %.3f\n", kinds[k].name, kinds[k].sum, kinds[k].sum / kinds[1].sum);
}

int main(int argc, char **argv)
{
    const bool writes = argc == 7 && strcmp(argv[2], "none") == 0;
    struct llama_model *model;
    float *stock, *ours;
    FILE *file;
    int n_pieces;

    if (argc != 7 || (n_pieces = atoi(argv[5])) < 1)
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
