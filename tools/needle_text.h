/* needle_text.h - long texts with sentences hidden in them that the model is asked for at the end.
 *
 * The text around is the user's file or sentences made here; a hidden sentence names a city and a
 * secret number of five digits. The question repeats the sentence up to the number, so that models
 * without instruction tuning can answer.
 */
#pragma once

#include "engine.h"

#define NEEDLE_MAX 24
#define NEEDLE_TOKENS 48 /* of a question with its answer, at most */

typedef struct needle {
    llama_token question[NEEDLE_TOKENS]; /* and behind it the answer */
    size_t n_question, n_answer;
} needle;

typedef struct needle_text {
    llama_token *tokens; /* without any question */
    size_t n_tokens;
    needle needles[NEEDLE_MAX]; /* of n, number i is hidden at (i + 1/2) / n of the text */
    size_t n_needles;
} needle_text;

/* Makes a text that fits into n_tokens together with any one of its questions and answers.
 * haystack: the sentences around the needles, ended by a 0, or NULL. The seed decides where the
 * haystack begins, and which cities and numbers are hidden. needle_text_free() is needed in any
 * case. False after complaining. */
bool needle_text_make(needle_text *text, const engine *e, const char *haystack, size_t n_tokens,
                      size_t n_needles, uint32_t seed);
void needle_text_free(needle_text *text);
