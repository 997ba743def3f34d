/* test_plugin_first_request.c - how a server's first request affects later answers, with the codecs
 * of the default preset and no calibration.
 *
 * The codecs learn the centre and scale of keys from rows. A monotonous first request once set them
 * for good, and made the divergence of all later answers up to fifteen times as large. The test
 * names the codecs, because a preset keeps the first and the newest tokens as fp16, and on a CPU
 * these are all tokens of the answers.
 *
 * Answers to one text do not decide for larger models: by chance a figure differs by a quarter.
 * With KVANT_TEST_TEXT, a file, figures are means over KVANT_TEST_PIECES pieces of it. Each piece
 * has a new context for every request. */
#include "harness.h"

enum {
    N_TEXT = 400,
    N_REQUEST = 200,
    MOST_REQUEST = 1200,
    N_PROMPT = 120,
    N_LAST = 80,
    N_STEPS = 40,
    N_ANSWERS = 2,
    N_LOGITS = N_ANSWERS * (N_LAST + N_STEPS),
    MOST_BYTES = 1 << 18
};

#define KEYS "trellis-4:transform=first"
#define VALUES "trellis-4"

typedef struct request {
    const char *format,
        *word; /* of the line that is printed; word NULL: the tokens are text, or in no order */
    int n;
    double kld;
} request;

/* Indices of the requests that have no word. */
enum { NOTHING, TOKEN, ORDINARY, NO_ORDER = 9, N_KINDS };

static llama_token *text; /* N_TEXT tokens of each piece */
static int n_pieces = 1;

/* Logits of the end of each prompt and of its answer, from a cache that had a first request of n
 * tokens. */
static float *answers(const char *spec, const llama_token *piece, const llama_token *tokens, int n)
{
    const harness_options options = { .spec = spec, .values = VALUES, .n_ctx = 2048 };
    struct llama_context *context = harness_context(&options);
    llama_memory_t memory = llama_get_memory(context);
    size_t vocab = harness_n_vocab();
    float *logits = malloc(N_LOGITS * vocab * sizeof(float)), *next = logits;

    assert_non_null(logits);
    if (n > 0)
        harness_decode(context, tokens, n, 0, 0, false);
    for (int a = 0; a < N_ANSWERS; a++) {
        const llama_token *prompt = piece + a * (N_TEXT / 2);
        llama_memory_seq_rm(memory, 0, -1, -1);
        harness_decode(context, prompt, N_PROMPT, 0, 0, true);
        memcpy(next, llama_get_logits_ith(context, N_PROMPT - N_LAST),
               N_LAST * vocab * sizeof(float));
        next += N_LAST * vocab;
        for (int i = 0; i < N_STEPS; i++, next += vocab) {
            harness_decode(context, prompt + N_PROMPT + i, 1, N_PROMPT + i, 0, false);
            memcpy(next, llama_get_logits_ith(context, -1), vocab * sizeof(float));
        }
    }
    llama_free(context);
    return logits;
}

static void fill(llama_token *tokens, const request *r, int kind, const llama_token *piece)
{
    llama_token word[8];
    int n = 0;

    if (r->word != NULL) {
        n = llama_tokenize(harness_vocab(), r->word, (int32_t)strlen(r->word), word, 8, false,
                           false);
        assert_true(n > 0);
    }
    for (int i = 0; i < r->n; i++)
        tokens[i] = r->word != NULL    ? word[i % n]
                    : kind == NO_ORDER ? (i * 7919 + 13) % 40000 + 100
                                       : piece[kind == TOKEN ? i : 100 + i];
}

/* Reads pieces of a file that are far apart. Each prompt begins with the model's first token, if
 * the model has one. */
static void read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    char *bytes = malloc(MOST_BYTES);
    llama_token *all = malloc(MOST_BYTES * sizeof *all);
    const char *pieces = getenv("KVANT_TEST_PIECES");
    const bool begins = llama_vocab_get_add_bos(harness_vocab());
    int n;

    n_pieces = pieces != NULL ? atoi(pieces) : 4;
    assert_true(file != NULL && bytes != NULL && all != NULL && n_pieces > 0);
    n = llama_tokenize(harness_vocab(), bytes, (int32_t)fread(bytes, 1, MOST_BYTES, file), all,
                       MOST_BYTES, true, false);
    assert_true(n >= n_pieces * N_TEXT);
    text = malloc((size_t)n_pieces * N_TEXT * sizeof *text);
    assert_non_null(text);
    for (int p = 0; p < n_pieces; p++) {
        memcpy(text + p * N_TEXT, all + (size_t)p * (size_t)(n / n_pieces), N_TEXT * sizeof *text);
        for (int a = 0; a < N_ANSWERS && begins; a++)
            text[p * N_TEXT + a * (N_TEXT / 2)] = all[0];
    }
    fclose(file);
    free(bytes);
    free(all);
}

CASE(no_first_request_spoils_later_ones)
{
    /* A single token is too short to learn from. A GPU sees all keys of a first prompt as fp16. */
    request requests[N_KINDS] = { { "mean KLD of a first request %.4f", NULL, 0, 0 },
                                  { ", after a token %.4f", NULL, 1, 0 },
                                  { ", after ordinary text %.4f\n", NULL, N_REQUEST, 0 },
                                  { NULL, " the", 200, 0 },
                                  { NULL, "\n", 80, 0 },
                                  { NULL, "Hello", 40, 0 },
                                  { NULL, "0, ", 200, 0 },
                                  { NULL, "ping\n", 70, 0 },
                                  { NULL, " the", MOST_REQUEST, 0 },
                                  { "after 200 tokens in no order: %.4f\n", NULL, N_REQUEST, 0 } };
    llama_token tokens[MOST_REQUEST];
    /* Allowed factor over the largest divergence after a harmless request, because these differ by
     * chance, too. Quantised weights make activations of 8 bits, which causes as large a
     * difference. */
    const double most = harness_has_floats() ? 1.2 : 1.5;
    const char *path = getenv("KVANT_TEST_TEXT");
    double worst = 0, harmless;

    if (path != NULL) {
        read_text(path);
    } else {
        text = malloc(N_TEXT * sizeof *text);
        assert_non_null(text);
        harness_tokens(text, N_TEXT);
    }
    for (int p = 0; p < n_pieces; p++) {
        const llama_token *piece = text + p * N_TEXT;
        float *stock = answers(NULL, piece, NULL, 0);
        for (int kind = 0; kind < N_KINDS; kind++) {
            fill(tokens, &requests[kind], kind, piece);
            float *ours = answers(KEYS, piece, tokens, requests[kind].n);
            requests[kind].kld += harness_mean_kld(stock, ours, N_LOGITS) / n_pieces;
            free(ours);
        }
        free(stock);
    }
    for (int kind = 0; kind < N_KINDS; kind++) {
        const request *r = &requests[kind];
        if (r->word != NULL)
            print_message("after %d tokens of \"%s\": %.4f\n", r->n, r->word, r->kld);
        else
            print_message(r->format, r->kld);
        worst = r->kld > worst ? r->kld : worst;
    }
    free(text);
    harmless = fmax(requests[NOTHING].kld, fmax(requests[TOKEN].kld, requests[ORDINARY].kld));
    assert_true(harmless > 1e-4 && harmless < 0.1);
    assert_true(worst <= most * harmless);
}

RUN_CASES(harness_start, harness_stop)
