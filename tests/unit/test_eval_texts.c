/* test_eval_texts.c - which tokens of which text the chunks of an evaluation have. */
#include "testing.h"

#include "../../tools/command.h"
#include "../../tools/eval_texts.h"
#include "../../tools/text.h"

/* A text is its length; its token i is 1000 times the length, plus i. */
char *read_text(const char *path, size_t *bytes)
{
    *bytes = strtoul(path, NULL, 10);
    return calloc(*bytes + 1, 1);
}

llama_token *engine_tokenize(const engine *e, const char *text, size_t bytes, token_kind kind,
                             size_t *n)
{
    llama_token *tokens = malloc((bytes + 1) * sizeof *tokens);
    *n = bytes;
    for (size_t i = 0; i < bytes; i++)
        tokens[i] = (llama_token)(1000 * bytes + i);
    return tokens;
}

static char complaint[256];

/* Keeps error lines, not hints. */
bool report_line(const char *prefix, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (strcmp(prefix, "kvant: ") == 0)
        vsnprintf(complaint, sizeof complaint, format, args);
    va_end(args);
    return false;
}

/* firsts: the first token of every chunk, then 0. */
static void check(const char *const *files, size_t n, eval_cut cut, const llama_token *firsts)
{
    eval_texts t;
    size_t chunks = 0;
    complaint[0] = 0;
    assert_true(eval_texts_load(&t, NULL, files, n, &cut));
    for (; firsts[chunks] != 0; chunks++) {
        assert_true(chunks < t.n_chunks);
        for (size_t i = 0; i < cut.n_ctx; i++)
            assert_int_equal(t.chunks[chunks].tokens[i], firsts[chunks] + (llama_token)i);
    }
    assert_int_equal(t.n_chunks, chunks);
    eval_texts_free(&t);
}

#define FIRSTS(...) ((const llama_token[]){ __VA_ARGS__, 0 })

CASE(chunks_follow_each_other)
{
    const char *const one[] = { "35" }, *const two[] = { "35", "17" };
    check(one, 1, (eval_cut){ .n_ctx = 8, .n_parts = 1 }, FIRSTS(35000, 35008, 35016, 35024));
    check(one, 1, (eval_cut){ .n_ctx = 8, .n_parts = 1, .skip = 1, .at_most = 2 },
          FIRSTS(35008, 35016));
    check(two, 2, (eval_cut){ .n_ctx = 8, .n_parts = 1, .at_most = 1 }, FIRSTS(35000, 17000));
}

CASE(long_texts_are_scored_in_part)
{
    const char *const one[] = { "47" };
    check(one, 1, (eval_cut){ .n_ctx = 8, .n_parts = 1 }, FIRSTS(47000, 47008, 47016, 47024));
    assert_non_null(
        strstr(complaint, "4 of the 5 chunks of 47 are scored; --chunks N or --chunks all"));
    check(one, 1, (eval_cut){ .n_ctx = 8, .n_parts = 1, .at_most = EVAL_ALL_CHUNKS },
          FIRSTS(47000, 47008, 47016, 47024, 47032));
    assert_string_equal(complaint, "");
}

/* The tokens that `kvant tune` measures and the tokens that it checks with are never the same. */
CASE(chunks_are_taken_from_all_parts)
{
    const char *const one[] = { "101" };
    check(one, 1, (eval_cut){ .n_ctx = 8, .n_parts = 3, .at_most = 3 },
          FIRSTS(101000, 101033, 101066));
    check(one, 1, (eval_cut){ .n_ctx = 8, .n_parts = 3, .skip = 3, .at_most = 4 },
          FIRSTS(101008, 101041, 101074, 101016));
    check(one, 1, (eval_cut){ .n_ctx = 30, .n_parts = 3 }, FIRSTS(101000, 101033, 101066));
}

CASE(texts_without_the_chunks)
{
    static const struct {
        const char *file;
        eval_cut cut;
        const char *said;
    } cases[] = {
        { "15",
          { .n_ctx = 8, .n_parts = 1 },
          "15 has 15 tokens, but a context of 8 needs at least 16" },
        { "31",
          { .n_ctx = 8, .n_parts = 1, .skip = 3 },
          "31 has 31 tokens, but a context of 8 needs at least 32" },
        { "15",
          { .n_ctx = 8, .n_parts = 2 },
          "15 has 15 tokens, but a context of 8 needs at least 16" },
        { "31",
          { .n_ctx = 8, .n_parts = 2, .skip = 2 },
          "31 has 31 tokens, but a context of 8 needs at least 32" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        eval_texts t;
        assert_false(eval_texts_load(&t, NULL, &cases[i].file, 1, &cases[i].cut));
        assert_non_null(strstr(complaint, cases[i].said));
        eval_texts_free(&t);
    }
    const char *const few[] = { "20" };
    check(few, 1, (eval_cut){ .n_ctx = 8, .n_parts = 2, .at_most = 5 }, FIRSTS(20000, 20010));
    assert_non_null(
        strstr(complaint, "20 has only 2 chunks of 8 tokens, fewer than the 5 of --chunks"));
}

RUN_CASES(NULL, NULL)
