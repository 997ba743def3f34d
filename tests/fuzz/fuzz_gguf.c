/* fuzz_gguf.c - any bytes as the head of a model's file, for the two users of such heads: the
 * command (tools/gguf_file.c) and the plug-in (model_file.c). They answer, or say that they
 * cannot, and agree on the number of layers where both answer. For libFuzzer (clang
 * -fsanitize=fuzzer). With KVANT_FUZZ_SMOKE it is a program that mutates a valid file itself, a
 * fixed number of times.
 *
 * The input is the file. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../../integrations/llama.cpp/model_file.h"
#include "../../tools/gguf_file.h"

static char path[] = "/tmp/kvant_fuzz_gguf_XXXXXX";

static void require_at(int condition, int line)
{
    if (condition)
        return;
    fprintf(stderr, "fuzz_gguf.c:%d: not as it has to be\n", line);
    abort();
}

#define require(condition) require_at(condition, __LINE__)

static void remove_file(void)
{
    unlink(path);
}

static void write_file(const uint8_t *data, size_t n)
{
    static int file = -1;
    if (file < 0) {
        file = mkstemp(path);
        atexit(remove_file);
    }
    require(file >= 0 && ftruncate(file, 0) == 0 && pwrite(file, data, n, 0) == (ssize_t)n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n); /* libFuzzer's name */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    gguf_size size;
    write_file(data, n);
    const kvp_model_layers layers = kvp_count_model_layers(path);
    require(layers.with_keys <= layers.all);
    if (gguf_read_size(path, &size))
        require(size.n_layers > 0 && size.n_layers <= GGUF_MAX_LAYERS && size.bytes == n);
    return 0;
}

#ifdef KVANT_FUZZ_SMOKE
#include "mutate.h"

#define ROUNDS 4000u

static uint8_t file[1024];
static size_t length;

static void put(const void *bytes, size_t n)
{
    require(length + n <= sizeof file);
    memcpy(file + length, bytes, n);
    length += n;
}

static void put_u32(uint32_t number)
{
    put(&number, sizeof number);
}

static void put_text(const char *text)
{
    const uint64_t n = strlen(text);
    put(&n, sizeof n);
    put(text, n);
}

static void put_number(const char *key, uint32_t number)
{
    put_text(key);
    put_u32(4);
    put_u32(number);
}

/* A model with an array of numbers, an array of words and all keys that the readers look for. */
static void make_model(void)
{
    static const char *const words[] = { "a", "the", "" };
    const uint64_t n_tensors = 3, n_keys = 8, n_words = 3, n_heads = 4;
    const uint32_t version = 3, heads[4] = { 8, 8, 0, 8 };
    put("GGUF", 4);
    put(&version, sizeof version);
    put(&n_tensors, sizeof n_tensors);
    put(&n_keys, sizeof n_keys);
    put_text("general.architecture");
    put_u32(8);
    put_text("llama");
    put_text("tokenizer.ggml.tokens");
    put_u32(9);
    put_u32(8);
    put(&n_words, sizeof n_words);
    for (int i = 0; i < 3; i++)
        put_text(words[i]);
    put_text("llama.attention.head_count");
    put_u32(9);
    put_u32(5);
    put(&n_heads, sizeof n_heads);
    put(heads, sizeof heads);
    put_number("llama.block_count", 30);
    put_number("llama.nextn_predict_layers", 2);
    put_number("llama.attention.shared_kv_layers", 10);
    put_text("llama.rope.freq_base");
    put_u32(6);
    put(&(float){ 10000 }, sizeof(float));
    put_text("general.name");
    put_u32(8);
    put_text("a name");
}

int main(int argc, char **argv)
{
    const unsigned long rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : ROUNDS;
    static uint8_t data[sizeof file];
    uint64_t state = FUZZ_SEED + rounds;
    gguf_size size;
    make_model();
    write_file(file, length);
    require(kvp_count_model_layers(path).all == 28 && kvp_count_model_layers(path).with_keys == 18);
    require(gguf_read_size(path, &size) && size.n_layers == 30);
    for (unsigned long i = 0; i < rounds; i++) {
        size_t n = length;
        memcpy(data, file, n);
        fuzz_mutate(data, &n, 24, 3, &state);
        LLVMFuzzerTestOneInput(data, n);
    }
    printf("%lu mutated heads: read, or refused\n", rounds);
    return 0;
}
#endif
