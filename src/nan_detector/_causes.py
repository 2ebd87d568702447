"""The closed list of cause codes: one frozen entry a mechanism, in the order the documentation shows them.

A code names a mechanism, not an operation. The rules of `_diagnosis` may only use codes from here, and `docs/causes.md`
is written by `as_markdown`. The file is long because it is a table: the texts of every cause stand here, nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nan_detector._records import Cause


@dataclass(frozen=True, slots=True)
class CauseInfo:
    """What is always true of one cause.

    Attributes:
        code: The stable name that other programs read.
        title: A short phrase for a person.
        explanation: One sentence for the report: the mechanism.
        fix: The general way out; a rule that knows the call gives a closer one.
        docs: Three sentences for the documentation.
    """

    code: str
    title: str
    explanation: str
    fix: str
    docs: str


_C = CauseInfo

_DOMAIN = (
    _C(
        "log_of_zero",
        "logarithm of zero",
        "The logarithm falls to -inf at the edge of its domain, and its slope to infinity.",
        "Take the logarithm of a value that cannot reach 0: x.clamp_min(eps), or F.log_softmax / F.logsigmoid instead.",
        "log(0) is -inf, log1p(-1) and logit at 0 or 1 likewise. "
        "A probability reaches exactly 0 when a softmax or sigmoid underflows, when a class does not occur, or when a "
        "sampler draws its boundary. "
        "Functions that work in log space (log_softmax, logsigmoid, binary_cross_entropy_with_logits) never form the "
        "0. "
        "In an entropy 0 * log(0) means 0, and is NaN: torch.xlogy(p, p) gives 0, as torch.xlogy(a, p) does for any a "
        "that is 0 there; but its slope in p is NaN there, so where p is trained a clamp is the way.",
    ),
    _C(
        "log_of_negative",
        "logarithm of a negative number",
        "The logarithm has no real value below the edge of its domain.",
        "Find why the argument went below 0; clamp it only where rounding is the reason.",
        "log of a negative number is NaN, log1p below -1 and logit outside [0, 1] likewise. "
        "The argument is usually meant to be a probability, a variance or 1 - a**2, and an assumption about its range "
        "does "
        "not hold. "
        "When it is below 0 by a few units in the last place, rounding is to blame and a clamp is right; otherwise the "
        "formula is wrong.",
    ),
    _C(
        "sqrt_of_negative",
        "square root of a negative number",
        "The square root has no real value below 0.",
        "Compute the quantity so that it cannot be negative (torch.var, a sum of squares), or clamp_min(0) and add an "
        "eps.",
        "sqrt and rsqrt of a negative number are NaN. "
        "The usual source is a variance computed as E[x^2] - E[x]^2, or a squared distance as a^2 + b^2 - 2ab: two "
        "large "
        "numbers that nearly cancel leave only rounding errors, of either sign. "
        "The two-pass formula (torch.var, (x - mean)**2) does not cancel.",
    ),
    _C(
        "pow_of_negative",
        "negative number to a fractional power",
        "A negative base has no real value under a fractional exponent.",
        "Raise the magnitude and give the sign back: x.sign() * x.abs().pow(p), or clamp the base at 0.",
        "x ** p is NaN when x is negative and p is not a whole number. "
        "Gamma correction, generalised means and polynomial schedules past their end meet it. "
        "The magnitude can be raised and the sign restored, or the base clamped, according to what the formula means.",
    ),
    _C(
        "pow_of_zero",
        "zero to a negative power",
        "Zero to a negative exponent is a division by zero.",
        "Keep the base away from 0: x.clamp_min(eps).pow(p).",
        "x ** p with p below 0 is 1 / x ** -p, so it is infinite at x = 0. "
        "Degrees of isolated nodes, empty counts and padded distances are typical bases. "
        "Clamp the base, or set the result at 0 by a where on the base before the power.",
    ),
    _C(
        "outside_domain",
        "argument outside the function's domain",
        "The function has no real value there.",
        "Clamp the argument into the open domain, e.g. x.clamp(-1 + eps, 1 - eps).",
        "acos, asin, atanh and erfinv are defined on [-1, 1], acosh from 1 on; beyond that they give NaN. "
        "A cosine computed from normalised vectors or from the trace of a rotation passes 1 by rounding alone. "
        "Clamp a little inside the edge, because at the edge the slope is infinite.",
    ),
    _C(
        "boundary_of_domain",
        "argument exactly at the edge of the function's domain",
        "The function is infinite exactly at the edge of its domain.",
        "Keep the argument strictly inside: x.clamp(-1 + eps, 1 - eps).",
        "atanh and erfinv are infinite at -1 and 1, ndtri at 0 and 1, lgamma and digamma at 0, -1, -2 and so on. "
        "Rounding puts a value exactly on the edge more often than one expects: tanh(10) is 1.0 in float32. "
        "A clamp at the edge itself does not help; clamp strictly inside.",
    ),
    _C(
        "division_by_zero",
        "division by zero",
        "x/0 is infinite and 0/0 is NaN.",
        "Guard the denominator itself: x / n.clamp_min(eps), or skip what has nothing to divide.",
        "A denominator was exactly 0: an empty mask, a length of 0, the norm of a zero vector, a collapsed box, a "
        "constant "
        "column. "
        "0/0 is NaN, anything else over 0 is infinite, and rsqrt(0) is the same thing. "
        "Clamping the denominator, not the result, keeps both the value and its gradient finite.",
    ),
    _C(
        "determinant_not_positive",
        "matrix is not positive: its determinant is 0 or negative",
        "The log-determinant exists only where the determinant is positive.",
        "Use torch.linalg.slogdet and look at the sign, or parametrise the matrix so that it stays positive (LU, exp, "
        "L L^T + eps I).",
        "logdet gives NaN for a negative and -inf for a zero determinant, and a Cholesky factor exists only for a "
        "positive "
        "matrix. "
        "Training moves a free matrix through singular ones: one large step is enough to flip the sign. "
        "A parametrisation that cannot become singular, or slogdet with the sign checked, removes the cliff.",
    ),
    _C(
        "singular_matrix",
        "matrix has no inverse",
        "Solving or inverting divides by a pivot, and one of them is 0 to the precision of the dtype.",
        "Add a multiple of the identity before (A + eps * torch.eye(n)), or use torch.linalg.lstsq or pinv.",
        "Two equal rows, fewer samples than features or a zero on the diagonal leave a matrix without an inverse. "
        "torch.linalg.inv and solve raise then; inv_ex, solve_ex, solve_triangular and cholesky_inverse go on with "
        "infinities. "
        "A ridge (A + eps I) makes every pivot positive when A is a Gram or covariance matrix.",
    ),
    _C(
        "reduction_of_empty",
        "mean over nothing",
        "The average of no elements is 0/0.",
        "Skip the term when nothing was selected, or divide a sum by count.clamp_min(1).",
        "mean over an empty selection is NaN, and so is a loss averaged over labels that are all ignored. "
        "It happens in the rare batch where a mask, a filter or ignore_index leaves nothing. "
        "A sum divided by max(count, 1) is 0 there, which is what is usually meant.",
    ),
    _C(
        "std_of_one",
        "standard deviation of one element",
        "With the default correction=1, std and var need two elements.",
        "Use correction=0, or skip the normalisation when there is only one element.",
        "std and var divide by n - correction, and the default correction is 1. "
        "With one element (a last batch of one, a group of one sample) that is 0/0 = NaN. "
        "correction=0 gives 0, which still needs an eps where something is divided by it.",
    ),
    _C(
        "zero_times_inf",
        "zero times infinity",
        "0 times an infinity is NaN, whatever was meant by the 0.",
        "Replace the infinite factor before multiplying: torch.where(mask, x, 0.0) * p, or torch.special.entr / xlogy.",
        "A product with 0 does not switch an infinite factor off: 0 * inf is NaN, and inf / inf likewise. "
        "Masked log-probabilities (-inf) times probabilities (0) in an entropy are the common case. "
        "Select with where before multiplying, or use a function that defines the limit (xlogy, entr).",
    ),
    _C(
        "inf_minus_inf",
        "infinity minus infinity",
        "Two infinities of opposite effect met in a sum.",
        "Keep one of the two finite before they meet.",
        "inf - inf is NaN, also inside sums, means, softmax of +inf and normalisation layers. "
        "Both infinities were there before: masks, costs of impossible pairs, initial values of a minimum. "
        "Replace them by finite values, or select before subtracting.",
    ),
)

_RANGE = (
    _C(
        "exp_overflow",
        "exponential beyond the range of its dtype",
        "The exponential leaves the range of its dtype at a modest argument.",
        "Bound the argument: x.clamp(max=...), or use the stable form (softplus, sigmoid, logsumexp, log_softmax, "
        "expm1).",
        "exp(x) overflows at x = 88.7 in float32 and bfloat16, at 11.1 in float16, at 709.8 in float64. "
        "Log-variances, learned temperatures, probability ratios and softplus or sigmoid written by hand reach that. "
        "Bound the argument, or use the library function that never forms the large number.",
    ),
    _C(
        "half_overflow",
        "value beyond float16's 65504",
        "float16 ends at 65504; what is larger becomes inf.",
        "Scale before the operation, run it in float32 (x.float()), or use bfloat16.",
        "float16 holds nothing above 65504, so a square of 256, a matrix product before its scale or a running "
        "variance "
        "overflows. "
        "Casting a larger float32 value to float16 does the same. "
        "Scale first, compute that step in float32, or use bfloat16, which has float32's range.",
    ),
    _C(
        "overflow",
        "value beyond the range of its dtype",
        "The result is larger than the dtype can hold.",
        "Find why the inputs are this large; bound them or work with their logarithm.",
        "float32 and bfloat16 end at 3.4e38; a power, product, sum or lgamma beyond that is infinite. "
        "Inputs that large are nearly always a sign of something earlier: growth, a missing normalisation, a free "
        "parameter "
        "that ran away. "
        "Bound the parameter or stay in log space.",
    ),
    _C(
        "half_gradient_overflow",
        "gradient beyond float16's range",
        "A gradient passed 65504, usually because the loss scale multiplied it.",
        "Let torch.amp.GradScaler lower the scale, start lower, or use bfloat16.",
        "Gradients in float16 overflow at 65504 like everything else, and the loss scale multiplies all of them. "
        "A few such steps at the start are normal for a dynamic scaler, which skips them and halves the scale. "
        "Without a scaler, or with a fixed scale, lower the scale or use bfloat16.",
    ),
    _C(
        "underflow_to_zero",
        "denominator underflowed to zero",
        "A small positive denominator became exactly 0 because its dtype has no smaller number.",
        "Work in log space (logsumexp), normalise before exponentiating, or compute the denominator in float32.",
        "Below its least positive number a dtype has only 0: 6e-8 in float16, 1e-45 in float32. "
        "Products of probabilities, squares of small values and kernels exp(-d^2) fall below it, and then something "
        "divides "
        "by them. "
        "Staying in log space, subtracting the maximum first or a wider dtype keeps them apart from 0.",
    ),
    _C(
        "eps_underflow",
        "epsilon that rounds to zero in its dtype",
        "The guard against division by zero is itself 0 in this dtype.",
        "Use an eps that the dtype can hold (1e-6 or more in float16), or compute this step in float32.",
        "float16's least positive number is 6e-8, so eps=1e-8 (Adam) and eps=1e-12 (normalize) are exactly 0 there. "
        "The guard stands in the code and does nothing. "
        "Give a larger eps, or do this step in float32.",
    ),
)

_MASKS = (
    _C(
        "softmax_fully_masked",
        "softmax over a row that is -inf everywhere",
        "A row without one finite logit has no distribution: the softmax is 0/0.",
        "Leave at least one position unmasked, or zero the result of such rows: mask with finfo.min and multiply by "
        "row.any().",
        "Softmax divides by the sum of the exponentials, and that sum is 0 when every entry is -inf. "
        "A sample that is all padding, an image without foreground or a query that may attend to nothing makes such a "
        "row. "
        "Unmask one position and drop the row afterwards, or use a large negative finite mask value.",
    ),
    _C(
        "logsumexp_fully_masked",
        "logsumexp over a row that is -inf everywhere",
        "logsumexp of only -inf is rightly -inf, but its gradient is exp(-inf - -inf) = NaN.",
        "Use a large negative finite number for impossible states, or select the reachable rows before logsumexp.",
        "The value log(0) = -inf is right; the slope is a softmax over nothing, which is NaN. "
        "Dynamic programmes in log space (CRF, HMM, CTC by hand) meet it at unreachable states. "
        "Start from -1e4 or so instead of -inf, or compute only the reachable states.",
    ),
    _C(
        "mask_value_overflow",
        "mask value overflowed to -inf",
        "The lowest finite number plus a negative score falls below the range and becomes -inf.",
        "Use masked_fill, or a mask value with room below it: torch.finfo(dtype).min / 2.",
        "finfo.min is finite, but adding a negative score to it is not. "
        "A fully masked row that was meant to be uniform becomes -inf everywhere, and its softmax NaN. "
        "Replace scores with masked_fill instead of adding, or halve the mask value.",
    ),
    _C(
        "masked_logit_in_loss",
        "masked logit reached the loss",
        "A -inf logit was counted: as the target class, or through label smoothing.",
        "Do not smooth over masked classes, check that no target is masked, or mask with a large finite value.",
        "Masking a class with -inf says that its probability is 0; a loss that puts weight on it is infinite. "
        "Label smoothing puts weight on every class, and a wrong label can name a masked one. "
        "Leave masked classes out of the loss, or use a finite mask value.",
    ),
    _C(
        "ctc_no_alignment",
        "target too long for the input",
        "No alignment of that length exists, so its probability is 0 and the loss inf.",
        "Filter such samples, lower the downsampling, or pass zero_infinity=True.",
        "CTC needs at least one frame per target symbol, and one more between equal neighbours. "
        "Downsampling layers or short clips leave fewer. "
        "zero_infinity=True gives those samples loss and gradient 0; filtering them is cleaner.",
    ),
)

_BACKWARD = (
    _C(
        "sqrt_gradient_at_zero",
        "the gradient of sqrt is infinite at 0",
        "d sqrt(x)/dx = 1/(2 sqrt(x)) is infinite at 0, and NaN where it meets a zero gradient.",
        "Add the eps inside the root: (x + eps).sqrt(); or torch.linalg.vector_norm, whose gradient at 0 is 0.",
        "sqrt(0) = 0 is harmless forward, but the slope there is infinite, and 0 * inf = NaN behind it. "
        "Distances between equal points, norms of zero vectors and hand-written Adam steps end in such a root. "
        "An eps after the root does not help; it has to be inside, or the root has to be skipped by a where on its "
        "input.",
    ),
    _C(
        "pow_gradient_at_zero",
        "the gradient of a fractional power is infinite at 0",
        "d x^p/dx = p x^(p-1) is infinite at 0 for p below 1.",
        "Keep the base away from 0: x.clamp_min(eps).pow(p).",
        "x ** p with p between 0 and 1 is finite at 0 and its slope is not. "
        "Gamma curves, focal weights and p-norms use such powers. "
        "Clamp the base before the power; a clamp after it is too late.",
    ),
    _C(
        "gradient_at_domain_boundary",
        "the gradient is infinite at the edge of the function's domain",
        "The function is finite at the edge, its slope is not.",
        "Clamp strictly inside the domain: x.clamp(-1 + eps, 1 - eps).",
        "acos and asin have an infinite slope at -1 and 1, acosh at 1, logit and atanh at their edges. "
        "clamp(-1, 1) makes the value safe and passes the gradient at the edge through. "
        "Clamp a little inside, or use atan2, whose slope is finite.",
    ),
    _C(
        "unselected_branch",
        "a non-finite value that was dropped comes back in the backward",
        "What a where, mask or clamp drops still gets a gradient of 0, and 0 * inf is NaN.",
        "Make the input safe before the operation (double where): f(torch.where(ok, x, 1.0)).",
        "where, masked_select, clamp and minimum choose among finished results: the one not chosen was computed as "
        "well. "
        "Its gradient is 0, and multiplied with the infinite slope of the operation that made it, 0 * inf = NaN. "
        "Replace the bad input before the operation, then select as before.",
    ),
    _C(
        "degenerate_decomposition",
        "decomposition of a matrix with equal or zero singular values",
        "The gradients of its factors divide by differences of singular or eigenvalues, and one of them is 0.",
        "Use a function of the result that does not need the vectors (svdvals, eigvalsh), or perturb: A + eps * "
        "torch.diag(torch.arange(n)).",
        "The derivative of U and V divides by s_i^2 - s_j^2, of eigenvectors by l_i - l_j, of QR by the diagonal of R. "
        "Low-rank matrices, symmetric point sets and identity initialisations have equal values. "
        "Take only the values, add a small asymmetric perturbation, or write the backward of the whole function.",
    ),
    _C(
        "custom_backward",
        "made inside a custom backward",
        "The code of a torch.autograd.Function's backward made it.",
        "Treat the edge in that backward, and hold it against torch.autograd.gradcheck at the values shown.",
        "The operation stands in the backward method of a user's torch.autograd.Function. "
        "PyTorch cannot know the limit there; the method has to treat zeros and edges itself. "
        "gradcheck at exactly these inputs shows the difference.",
    ),
)

_LOOP = (
    _C(
        "learning_rate_non_finite",
        "learning rate is not a finite number",
        "The step multiplies every update with it, so every weight goes with it.",
        "Stop the schedule at its last step: max(0.0, 1 - it / total) ** power.",
        "A learning rate of NaN or inf turns every weight non-finite in one step. "
        "Schedules do it past their end (a negative base under a fractional power) or with a total of 0 steps. "
        "Clamp the schedule's progress to [0, 1].",
    ),
    _C(
        "learning_rate_too_high",
        "the steps are too large: loss and weights grow by a factor each step",
        "Each step overshoots by more than it corrects, so everything grows until the largest operation overflows.",
        "Lower the learning rate, scale the inputs, warm up, or clip the gradient norm.",
        "Above 2 / curvature a gradient step overshoots, and the error grows by a constant factor per step. "
        "The operation that overflows first is innocent. "
        "A lower rate, scaled inputs, warm-up or clipping is the remedy.",
    ),
    _C(
        "gradient_explosion",
        "gradients grew until they overflowed",
        "The gradient grew by a factor per layer, time step or training step until the dtype ended.",
        "Clip the gradient norm, normalise activations, or shorten the chain.",
        "A backward pass multiplies one Jacobian per layer or time step; factors above 1 grow exponentially. "
        "Deep stacks without normalisation and long recurrences do it within one step, unstable training over several. "
        "Clipping bounds the step; normalisation and better initial scales remove the growth.",
    ),
    _C(
        "gradients_accumulated",
        "gradients were never zeroed",
        "backward() adds to .grad, and nothing set it back, so the gradient is the sum of all steps.",
        "Call optimizer.zero_grad() once per optimizer step.",
        "PyTorch accumulates gradients until somebody zeroes them. "
        "Without zero_grad the step grows with the number of steps and keeps the direction of old data. "
        "Call zero_grad once per optimizer step, also when accumulating on purpose.",
    ),
    _C(
        "clip_norm_overflow",
        "the gradient norm overflowed while clipping",
        "The gradients are finite but their squared sum is not, so the clip coefficient is 0 or NaN.",
        "Compute the norm in float32 and unscale the gradients before clipping.",
        "A norm adds squares, and a square overflows at the root of the range: 256 in float16, 1.8e19 in float32. "
        "max_norm / inf is 0, so clipping silently erases every gradient; inf * 0 makes NaN. "
        "Unscale before clipping, and accumulate norms in float32.",
    ),
    _C(
        "clip_spreads_nan",
        "clipping spread one bad gradient to all",
        "One non-finite gradient makes the total norm non-finite, and clipping multiplies every gradient with it.",
        "Repair the gradient that was bad first; clip_grad_norm_(..., error_if_nonfinite=True) stops before the "
        "damage.",
        "clip_grad_norm_ multiplies all gradients with max_norm / total_norm. "
        "With one NaN that factor is NaN, so afterwards every parameter looks guilty. "
        "The cause is the gradient that was bad before the clip.",
    ),
    _C(
        "loss_scale_zero",
        "loss scale shrank to zero",
        "The scale was halved until its dtype had only 0 left; dividing by it is 1/0.",
        "Give the scaler a lower bound (scale.clamp_min(1.0)), keep it in float32, and find why the steps overflow.",
        "A dynamic loss scaler halves the scale whenever a gradient overflows. "
        "When every step overflows for another reason it goes on to 0, and unscaling by 1/0 makes NaN of finite "
        "gradients. "
        "A lower bound reveals the real reason, which is a NaN in the model.",
    ),
    _C(
        "optimizer_state_non_finite",
        "optimizer state is already non-finite",
        "A moment that is NaN stays NaN, and every later step is NaN on clean data.",
        "Restore the optimizer's state together with the weights, or clear it: optimizer.state.clear().",
        "exp_avg and its relatives average over all steps, so one NaN stays for ever. "
        "Restoring only the weights after a bad step, or loading a checkpoint saved after one, leaves them poisoned. "
        "Restore or clear the state as well.",
    ),
    _C(
        "optimizer_state_overflow",
        "optimizer state beyond the range of its dtype",
        "The second moment averages squared gradients, and a square overflows long before the gradient does.",
        "Clip the gradients before the step, or keep optimizer state in float32.",
        "Adam, RMSprop and Adagrad keep squared gradients: a gradient above 256 in float16 or 1.8e19 in float32 "
        "overflows "
        "there. "
        "The parameter then stops moving (x / inf = 0) or becomes NaN. "
        "Clip first, or keep the state in a wider dtype.",
    ),
    _C(
        "hyperparameter_non_finite",
        "optimizer option is not a finite number",
        "An option of the optimizer (betas, eps, weight decay, momentum) is NaN or inf.",
        "Check the schedule that sets it.",
        "Options other than the learning rate are scheduled too: weight decay, momentum, the loss scale. "
        "A NaN there reaches every weight in one step. "
        "Clamp the schedule's progress to [0, 1].",
    ),
)

_STATE = (
    _C(
        "parameter_non_finite",
        "parameter was already non-finite",
        "No operation of the step made it.",
        "Check the initialisation and the checkpoint: torch.isfinite(p).all() for every parameter.",
        "The value was there before the first operation of the step: an initialisation (log of a class that does not "
        "occur), "
        "a checkpoint written after a NaN, or a write outside the step. "
        "Nothing in the step made it. "
        "Check parameters after building and after loading.",
    ),
    _C(
        "uninitialised_memory",
        "uninitialised memory",
        "The tensor was allocated and never written; its values are what the memory held.",
        "Initialise it: torch.zeros or nn.init instead of torch.empty.",
        "torch.empty and nn.Parameter(torch.empty(...)) give whatever was in memory: often 0, sometimes NaN or 1e38. "
        "Such runs fail once in a while and never under a debugger. "
        "Initialise every element.",
    ),
    _C(
        "buffer_non_finite",
        "buffer was already non-finite",
        "No operation of the step made it: a running statistic keeps what an earlier batch put there.",
        "Reset it (bn.reset_running_stats()) and find the batch that poisoned it.",
        "Buffers are not seen by the optimizer, so a NaN in running statistics survives every restore of the weights. "
        "In training mode batch norm does not even read them, so it shows in evaluation only. "
        "Reset or restore them with the weights.",
    ),
    _C(
        "ema_non_finite",
        "averaged copy of the weights is non-finite",
        "The average keeps what it was once given: the weights are clean, the copy is not.",
        "Rebuild the copy from the weights, and update it only after finite steps.",
        "An exponential moving average of weights or buffers keeps a NaN or inf for ever. "
        "It was updated after a bad step, or cast to a smaller dtype and back. "
        "Copy the clean weights over it, and skip its update when the step is skipped.",
    ),
)

_DATA = (
    _C(
        "input_non_finite",
        "bad values in the batch's input",
        "They were there before the model saw the batch.",
        "Check the data: torch.isfinite(x).all() in the dataset, and constant columns in the normalisation.",
        "The values came with the batch, so no operation of the step made them. "
        "Missing values, a normalisation by a standard deviation of 0 and corrupt files are the usual sources. "
        "Check in the dataset, where the sample is still known.",
    ),
    _C(
        "label_non_finite",
        "bad values in the batch's target",
        "They were there before the loss saw the batch.",
        "Check the targets in the dataset, and mask missing ones before the loss.",
        "The target came non-finite with the batch. "
        "Missing measurements are often stored as NaN, and a log or ratio of raw targets makes -inf. "
        "Mask them before the loss: a product with 0 does not.",
    ),
)

_ELSEWHERE = (
    _C(
        "gradient_from_outside",
        "gradient handed in from outside",
        "A gradient that no operation of the step made: from backward(gradient=...) or a hook.",
        "Check what is passed to backward(gradient=...) and what the tensor hooks return.",
        "The first non-finite value of the backward pass was given to autograd rather than computed by it. "
        "backward(gradient=...), autograd.grad(grad_outputs=...) and tensor hooks can do that. "
        "Look at what they hand over.",
    ),
    _C(
        "literal_nan",
        "a NaN or infinity written as a number",
        "The code itself writes it, and what was meant as a marker was used as a value.",
        "Fill with a value that is legal to read, or make sure every element is written.",
        "float('nan') as a filler marks what must not be read. "
        "Here it was read: an element was not overwritten, or a branch returned the marker. "
        "Fill with zeros, or select the written elements first.",
    ),
    _C(
        "opaque_kernel",
        "made by code that PyTorch's dispatcher does not see",
        "A C++/CUDA extension, Triton kernel or numpy call wrote it.",
        "Check that kernel's inputs and outputs at the call shown; replace it by its eager form to compare.",
        "The tensor was finite or absent before the call and non-finite after it, and no operation in between wrote "
        "it. "
        "Extensions, Triton kernels, numpy and .data writes are invisible to the dispatcher. "
        "The call that made or first used the tensor is named; look inside it.",
    ),
    _C(
        "compiler",
        "only the compiled program is non-finite",
        "The same step in eager mode is finite.",
        "Run this module without torch.compile, and report the difference upstream.",
        "The step was repeated in eager mode with the same inputs and was finite. "
        "Fused kernels reorder and contract arithmetic, which can cross an edge that eager execution does not. "
        "Exclude the module from compilation, or move away from the edge.",
    ),
    _C(
        "not_reproducible",
        "the same step again was finite",
        "The step was repeated with the same inputs and state and did not go wrong.",
        "Look for non-deterministic kernels, races with other threads or streams, and hardware errors.",
        "Inputs, weights, buffers and random state were restored, and the repeated step was finite. "
        "Non-deterministic kernels, a race in memory, state outside the model or faulty hardware remain. "
        "torch.use_deterministic_algorithms(True) and another device narrow it down.",
    ),
    _C(
        "unknown",
        "no known mechanism fits",
        "The operation turned finite inputs into a non-finite result, and none of the known mechanisms explains it.",
        "Look at the inputs shown, at exactly this line.",
        "The place is certain, the reason is not: no rule matched the numbers. "
        "The report gives the operation's inputs as they were. "
        "An honest unknown is better than a guess.",
    ),
)

#: Families in documentation order: heading, entries.
FAMILIES: tuple[tuple[str, tuple[CauseInfo, ...]], ...] = (
    ("Outside the function's domain", _DOMAIN),
    ("Out of range", _RANGE),
    ("Masks", _MASKS),
    ("Backward", _BACKWARD),
    ("Training loop", _LOOP),
    ("State", _STATE),
    ("Data", _DATA),
    ("Elsewhere", _ELSEWHERE),
)

#: Every cause, by code, in documentation order.
CAUSES: Mapping[str, CauseInfo] = MappingProxyType({info.code: info for _, infos in FAMILIES for info in infos})


def explain(code: str) -> CauseInfo:
    """What is known about a cause code.

    Raises:
        ValueError: There is no such code; the message lists all of them.
    """
    try:
        return CAUSES[code]
    except KeyError:
        raise ValueError(f"code={code!r} is not a cause. Known causes: {', '.join(CAUSES)}.") from None


def cause(code: str, *evidence: str, fix: str | None = None) -> Cause:
    """The record of a cause: the list's texts, this birth's evidence, and `fix` where it is closer than the list's.

    Raises:
        ValueError: There is no such code.
    """
    info = explain(code)
    return Cause(info.code, info.title, info.explanation, tuple(_sentence(e) for e in evidence if e), fix or info.fix)


def as_markdown(programs: Mapping[str, str] = MappingProxyType({})) -> str:
    """The text of `docs/causes.md`.

    Args:
        programs: What is said of each code behind its fix, by code: Markdown without an empty line at either end.
    """
    lines = [
        "# Causes",
        "",
        "Every event names its cause by one of these codes. A code names a mechanism, not an operation. The list is",
        "closed, and a code keeps its meaning once released. This page is written from the list in the source.",
        "",
        "Below each cause stand a program that fails in that way and what mends it. The tests run both: the event of",
        "the first has this very code, and the second has none.",
    ]
    for heading, infos in FAMILIES:
        lines += ["", f"## {heading}"]
        for info in infos:
            lines += [
                "",
                f"### `{info.code}`",
                "",
                f"**{info.title[:1].upper()}{info.title[1:]}.** {info.docs}",
                "",
                f"*Fix:* {info.fix}",
            ]
            if info.code in programs:
                lines += ["", programs[info.code]]
    return "\n".join(lines) + "\n"


#: Words that begin a sentence rather than name something of the user's, whose case must stay.
_FIRST_WORDS = ("a", "an", "the", "some", "something", "whole")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] if text.split(" ", 1)[0] in _FIRST_WORDS else text
