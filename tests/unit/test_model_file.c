/* test_model_file.c - the number of layers that the plug-in reads from a model's file. It believes
 * nothing of a damaged file. */
#include "testing.h"

#include "../../integrations/llama.cpp/model_file.h"

#include <unistd.h>

typedef struct file {
    unsigned char bytes[4096];
    size_t n;
} file;

static void put(file *f, const void *data, size_t bytes)
{
    assert_true(f->n + bytes <= sizeof f->bytes);
    memcpy(f->bytes + f->n, data, bytes);
    f->n += bytes;
}

static void put_u32(file *f, uint32_t x)
{
    put(f, &x, sizeof x);
}

static void put_u64(file *f, uint64_t x)
{
    put(f, &x, sizeof x);
}

static void put_text(file *f, const char *text)
{
    put_u64(f, strlen(text));
    put(f, text, strlen(text));
}

static file begin(uint64_t n_keys)
{
    file f = { .n = 0 };
    put(&f, "GGUF", 4);
    put_u32(&f, 3);
    put_u64(&f, 0);
    put_u64(&f, n_keys);
    return f;
}

static void put_number(file *f, const char *key, uint32_t x)
{
    put_text(f, key);
    put_u32(f, 4);
    put_u32(f, x);
}

/* The architecture, a list of texts and a list of numbers come before the fields that matter. */
static file begin_model(uint64_t n_more)
{
    file f = begin(4 + n_more);
    put_text(&f, "general.architecture");
    put_u32(&f, 8);
    put_text(&f, "llama");
    put_text(&f, "general.tags");
    put_u32(&f, 9);
    put_u32(&f, 8);
    put_u64(&f, 2);
    put_text(&f, "one");
    put_text(&f, "two");
    put_text(&f, "llama.rope.factors");
    put_u32(&f, 9);
    put_u32(&f, 6);
    put_u64(&f, 3);
    put(&f, (float[3]){ 1, 2, 3 }, 3 * sizeof(float));
    put_number(&f, "llama.block_count", 30);
    return f;
}

static kvp_model_layers count(const void *bytes, size_t n)
{
    char path[] = "/tmp/kvant-model-XXXXXX";
    const int at = mkstemp(path);
    kvp_model_layers layers;
    assert_true(at >= 0);
    assert_int_equal(write(at, bytes, n), n);
    close(at);
    layers = kvp_count_model_layers(path);
    remove(path);
    return layers;
}

static uint32_t layers_of(const void *bytes, size_t n)
{
    return count(bytes, n).with_keys;
}

CASE(layers_with_keys_of_their_own_are_counted)
{
    static const struct {
        const char *key;
        uint32_t value, expected, all;
    } cases[] = { { "llama.context_length", 4096, 30, 30 },
                  { "glm4moe.nextn_predict_layers", 1, 29, 29 },
                  { "glm4moe.nextn_predict_layers", 31, 0, 0 },
                  { "gemma3n.attention.shared_kv_layers", 10, 20, 30 },
                  { "gemma3n.attention.shared_kv_layers", 40, 0, 30 },
                  { "mamba.ssm.state_size", 16, 0, 30 },
                  { "lfm2.shortconv.l_cache", 3, 0, 30 },
                  { "t5.decoder_block_count", 6, 0, 30 } };
    file f = begin_model(0);
    assert_int_equal(layers_of(f.bytes, f.n), 30);
    for (size_t i = 0; i < COUNT(cases); i++) {
        f = begin_model(1);
        put_number(&f, cases[i].key, cases[i].value);
        assert_int_equal(layers_of(f.bytes, f.n), cases[i].expected);
        assert_int_equal(count(f.bytes, f.n).all, cases[i].all);
    }
    f = begin_model(1); /* kv heads of each layer */
    put_text(&f, "x.attention.head_count_kv");
    put_u32(&f, 9);
    put_u32(&f, 5);
    put_u64(&f, 2);
    put(&f, (int32_t[2]){ 0, 2 }, 8);
    assert_int_equal(layers_of(f.bytes, f.n), 0);
    f = begin(3); /* skips a tokenizer that comes first */
    put_text(&f, "tokenizer.ggml.tokens");
    put_u32(&f, 9);
    put_u32(&f, 8);
    put_u64(&f, 2);
    put_text(&f, "a");
    put_text(&f, "b");
    put_number(&f, "llama.block_count", 30);
    put_number(&f, "glm4moe.nextn_predict_layers", 1);
    assert_int_equal(layers_of(f.bytes, f.n), 29);
    f = begin_model(2); /* reads nothing of a tokenizer */
    put_text(&f, "tokenizer.ggml.tokens");
    put_u32(&f, 77);
    assert_int_equal(layers_of(f.bytes, f.n), 30);
    assert_int_equal(kvp_count_model_layers("/nowhere/model.gguf").with_keys, 0);
}

/* Truncated files, and files with any four bytes changed: the reader answers and reads no byte
 * outside of the file. */
CASE(damaged_files_are_not_believed)
{
    const file whole = begin_model(0);
    for (size_t n = 0; n < whole.n; n++)
        assert_int_equal(layers_of(whole.bytes, n), 0);
    for (size_t at = 0; at + 8 <= whole.n; at += 4) {
        file f = whole;
        memset(f.bytes + at, 0xff, 8);
        layers_of(f.bytes, f.n);
    }
}

RUN_CASES(NULL, NULL)
