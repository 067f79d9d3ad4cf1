"""The recurrences of stateful layers written out token by token, one document at a time."""

import torch
import torch.nn.functional as F


def delta_rule(q, k, v, g, beta):
    """One document, token by token: S <- e^g S + k (beta (v - S^T k))^T after decay; o = S^T q / sqrt(K)."""
    q, k = (F.normalize(x, dim=-1, eps=1e-6).repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    state, outputs = torch.zeros(v.shape[1], k.shape[-1], v.shape[-1], dtype=q.dtype), []
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        recalled = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - recalled))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs)


def kimi(q, k, v, g, beta):
    """[L, H, K] ... of one document: S <- Diag(e^g) S + k (beta (v - S^T k))^T; o = S^T q / sqrt(K)."""
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, outputs = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), []
    for t in range(len(q)):
        state = state * g[t].exp()[..., None]
        recalled = torch.einsum("hkv,hk->hv", state, k[t])
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - recalled))
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    return torch.stack(outputs)


def mamba2(x, dt, B, C, A, D):
    """x [L, H, V], dt [L, H], B and C [L, G, S] of one document: S <- e^(dt A) S + dt x B^T; y = S C + D x."""
    heads = x.shape[1] // B.shape[1]
    state, outputs = x.new_zeros(x.shape[1], x.shape[2], B.shape[2]), []
    for t in range(len(x)):
        step = F.softplus(dt[t])
        into, out_of = (y[t].repeat_interleave(heads, 0) for y in (B, C))
        state = state * (step * A).exp()[:, None, None] + torch.einsum("hv,hs->hvs", step[:, None] * x[t], into)
        outputs.append(torch.einsum("hvs,hs->hv", state, out_of) + D[:, None] * x[t])
    return torch.stack(outputs)
