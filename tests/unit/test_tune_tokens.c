/* test_tune_tokens.c - which tokens of which text are measured, and which the check takes: never the same. */
#include "testing.h"

#include "../../tools/command.h"
#include "../../tools/text.h"
#include "../../tools/tune_tokens.h"

/* A text is its length; token i of it is 1000 times that, plus i. */
char *read_text(const char *path, size_t *bytes)
{
    *bytes = strtoul(path, NULL, 10);
    return calloc(*bytes + 1, 1);
}

llama_token *engine_tokenize(const engine *e, const char *text, size_t bytes, token_kind kind, size_t *n)
{
    llama_token *tokens = malloc((bytes + 1) * sizeof *tokens);
    (void)e;
    (void)text;
    (void)kind;
    *n = bytes;
    for (size_t i = 0; i < bytes; i++)
        tokens[i] = (llama_token)(1000 * bytes + i);
    return tokens;
}

static char complaint[256];

void complain(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(complaint, sizeof complaint, format, args);
    va_end(args);
}

void hint(const char *format, ...)
{
    (void)format;
}

static void check(const tune_texts *texts, const llama_token *measured, const llama_token *checks)
{
    tune_tokens t;
    assert_true(tune_tokens_load(&t, NULL, texts));
    assert_int_equal(t.n_measured, texts->n * texts->n_parts);
    assert_int_equal(t.n_checks, texts->n_checks);
    for (size_t c = 0; c < t.n_measured; c++)
        for (uint32_t i = 0; i < texts->n_ctx; i++)
            assert_int_equal(t.measured[c * texts->n_ctx + i], measured[c] + (llama_token)i);
    for (size_t c = 0; c < t.n_checks; c++)
        for (uint32_t i = 0; i < texts->n_ctx; i++)
            assert_int_equal(t.check[c * texts->n_ctx + i], checks[c] + (llama_token)i);
    tune_tokens_free(&t);
    assert_null(t.measured);
}

static void contexts_are_where_they_should_be(void **state)
{
    (void)state;
    const tune_texts one = { .files = { "100" }, .n = 1, .n_ctx = 8, .n_parts = 1, .n_checks = 2 };
    check(&one, (const llama_token[]){ 100000 }, (const llama_token[]){ 100008, 100016 });
    const tune_texts parts = { .files = { "101" }, .n = 1, .n_ctx = 8, .n_parts = 3, .n_checks = 4 };
    check(&parts, (const llama_token[]){ 101000, 101033, 101066 },
          (const llama_token[]){ 101008, 101041, 101074, 101016 });
    const tune_texts two = { .files = { "100", "60" }, .n = 2, .n_ctx = 8, .n_parts = 2, .n_checks = 1 };
    check(&two, (const llama_token[]){ 100000, 100050, 60000, 60030 }, (const llama_token[]){ 100008 });
    const tune_texts own = {
        .files = { "16", "8" }, .n = 2, .n_ctx = 8, .n_parts = 1, .n_checks = 2, .report = "17"
    };
    check(&own, (const llama_token[]){ 16000, 8000 }, (const llama_token[]){ 17000, 17008 });
}

static void short_texts_are_refused(void **state)
{
    static const struct {
        tune_texts texts;
        const char *said;
    } cases[] = {
        { { .files = { "15" }, .n = 1, .n_ctx = 8, .n_parts = 1, .n_checks = 1 }, "15 gives 15 tokens, 16 are" },
        { { .files = { "99", "31" }, .n = 2, .n_ctx = 8, .n_parts = 2, .n_checks = 1 },
          "31 gives 31 tokens, 32 are" },
        { { .files = { "99" }, .n = 1, .n_ctx = 8, .n_parts = 1, .n_checks = 3, .report = "23" },
          "23 gives 23 tokens, 24 are" },
    };
    (void)state;
    for (size_t i = 0; i < COUNT(cases); i++) {
        tune_tokens t;
        assert_false(tune_tokens_load(&t, NULL, &cases[i].texts));
        assert_non_null(strstr(complaint, cases[i].said));
        tune_tokens_free(&t);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contexts_are_where_they_should_be),
        cmocka_unit_test(short_texts_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
