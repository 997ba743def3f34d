/* attention_without_ggml.c - stands for attention_ggml.c in builds without llama.cpp's headers. */
#include "attention_subject.h"

#include "command.h"

bool attention_ggml_knows(const char *type)
{
    (void)type;
    return true;
}

bool attention_ggml_open(const char *runtime, uint32_t n_threads)
{
    (void)runtime;
    (void)n_threads;
    complain("bench attention: this build has no llama.cpp binding, so there is no ggml to compare with");
    hint("--stock none measures kvant alone; or configure with -DKVANT_LLAMA_SRC=DIR");
    return false;
}

bool attention_ggml(attention_subject *subject, const attention_problem *problem, const char *type)
{
    (void)subject;
    (void)problem;
    (void)type;
    return false;
}

void attention_ggml_close(void)
{
}
