/* A decoder's forward over a paged cache, as plain C: the records that inference/native.py fills, and what one
 * instruction set gives.
 *
 * [Note: Batch invariance] Every element that is computed has its own accumulator, which takes the terms in one order,
 * over the input features (matrices) or over positions in blocks counted from 0 (attention), whatever else is computed
 * beside it. Tiles group independent accumulators; they never split one. So the logits of a token are the same bits
 * alone, in any batch, with any splitting of the prompt, and from cached prefixes, with one instruction set. A position
 * that is masked adds 0 * value, which changes nothing: the cache holds finite numbers only.
 */
#ifndef SLIPSTREAM_DECODER_H
#define SLIPSTREAM_DECODER_H

#include <stdint.h>

#define PANEL 16 /* output columns that lie together; also the positions of a cache block */
#define ROWS 6   /* rows of a tile: six accumulators of 16 lanes fill AVX2's registers, 24 those of AVX-512 */
#define CODES 32 /* features that share a scale where activations are rounded to 8 bits */
#define MAX_EXPERTS 512
#define MAX_THREADS 64

enum weight_type { WEIGHT_F32 = 0, WEIGHT_BF16 = 1, WEIGHT_F16 = 2, WEIGHT_INT8 = 3, WEIGHT_INT4 = 4 };
enum activation { ACTIVATION_SILU = 0, ACTIVATION_GELU_TANH = 1, ACTIVATION_GELU = 2 };

/* y = x W^T + bias. Columns are padded with zeros to a multiple of 2 * PANEL. */
struct matrix {
    const void *data; /* [panel][k][PANEL]; bf16: [panel][k / 2][PANEL][2], padded with a zero where k is odd; int8:
                         [panel][k / 4][PANEL][4]; int4: [panel][k / 8][PANEL][4] bytes, the first four k in the low halves */
    const void *scale; /* int8: fp32 [panel][PANEL]; int4: fp16 [panel][k / group][PANEL] */
    const void *low;   /* int4: fp16 as scale; w = q * scale + low. NULL: low is -8 * scale everywhere */
    const float *bias; /* fp32 [padded columns], or NULL */
    int64_t num_columns, num_features; /* int8, int4: features are padded with zeros to a multiple of CODES */
    int32_t type, group;               /* int4: a multiple of CODES */
};

/* A routed MLP. The shared expert, where there is one, is the last list: every row is on it. */
struct experts {
    int32_t num, top_k, normalize, has_shared;
    int64_t widest; /* the largest inner size of any */
    struct matrix router;
    const struct matrix *gate_up, *down; /* [num + has_shared] */
    const float *shared_gate;            /* [hidden] */
};

struct layer {
    const float *input_norm, *mlp_norm; /* multipliers as they are applied: an offset is already added */
    const float *attn_post_norm, *mlp_post_norm; /* or NULL */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    struct matrix q, k, v, out, gate_up /* panels of gate and up in turn */, down;
    const struct experts *experts; /* in place of gate_up and down; NULL: dense */
    const float *cosine, *sine; /* [max_context][rotary_dim / 2]; NULL: no rotation */
    void *keys;   /* [block][kv_head][head_dim][PANEL] */
    void *values; /* [block][kv_head][PANEL][head_dim] */
    int32_t rotary_dim, window;
};

struct decoder {
    int64_t hidden_size, intermediate_size, vocab_size;
    int32_t num_layers, num_heads, num_kv_heads, head_dim;
    int32_t cache_type; /* WEIGHT_F32 or WEIGHT_BF16 */
    int32_t embed_type;
    int32_t activation;
    float norm_eps, embed_scale, attn_scale, attn_softcap, logit_softcap;
    const void *embed; /* [vocab][hidden] */
    const float *final_norm; /* NULL: the head takes the rows as they are */
    struct matrix head;
    const struct layer *layers;
};

/* Which rows are on which expert's list. A row is copied to its place on each of its lists: [places] are num_rows *
 * (top_k + has_shared), list after list. */
struct routing {
    float *scores;  /* [num_rows][num] */
    float *shares;  /* [num_rows][top_k] what each of a row's experts adds counts for */
    int32_t *chosen; /* [num_rows][top_k] */
    int32_t *place; /* [num_rows][top_k + 1] */
    int32_t *first; /* [num + has_shared + 1] where a list begins */
    float *gathered, *act, *out; /* [places][hidden], [places][widest], [places][hidden] */
};

/* One forward. Rows are tokens; a sequence's rows follow one another at consecutive positions. */
struct batch {
    int32_t num_rows, num_sequences, num_logits;
    const int32_t *ids;       /* [num_rows] */
    const int32_t *first_row; /* [num_sequences + 1] */
    const int32_t *start;     /* [num_sequences] position of the first row */
    const int32_t *tables;    /* block ids of all sequences, one after the other */
    const int32_t *table_at;  /* [num_sequences] where a sequence's blocks begin in tables */
    const int32_t *logit_rows; /* [num_logits] */
    float *logits;            /* [num_logits][vocab_size] */
    float *x, *normed, *qkv, *attended, *act; /* scratch: [num_rows][...] */
    int8_t *codes; /* [num_rows][widest input, padded to CODES]; used where a matrix is int8 or int4 */
    float *scales; /* [num_rows][2][widest / CODES]: a group's scale; and its sum of codes times that */
    int32_t *totals;  /* [num_rows][widest / CODES]: a group's sum of codes */
    uint16_t *halves; /* as codes, in bf16; used where a matrix is bf16 and the instruction set multiplies that */
    struct routing routing; /* where a layer has experts; these four have a row per place then */
};

/* How a token is drawn from a row, and the room for it. inference/sampler.py fills it. */
struct sampling {
    double top_p, u; /* u: uniform in [0, 1) */
    int64_t vocab_size, top_k;
    float temperature, min_p;
    float *weights, *candidates; /* [vocab_size, to a multiple of 256] */
    float *most;                 /* [of that / 256] */
    double *sums;                /* as most */
};

struct team; /* the threads; see decoder.c */

struct decoder_isa {
    const char *name;
    void (*run)(const struct decoder *, const struct batch *, struct team *, int thread, float *scratch);
    int64_t (*choose)(const float *logits, const struct sampling *);
};

/* NULL where the compiler does not target that architecture. */
extern const struct decoder_isa *const decoder_avx512bf16, *const decoder_avx512vnni, *const decoder_avx512;
extern const struct decoder_isa *const decoder_avx2, *const decoder_portable;

/* Memory that a thread reads next, as far as it has not been asked for. */
struct ahead {
    const char *from, *until;
};

/* decoder.c */
void team_wait(struct team *, struct ahead *); /* until all threads have come here; meanwhile what is ahead is fetched */
int64_t team_next(struct team *, int stage, int thread, int64_t total); /* an item, each once, or `total` when all are taken */
int team_size(const struct team *);

#endif
