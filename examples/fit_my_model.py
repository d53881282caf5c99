"""Ten lines that fit a model into less memory: `bitplan.auto` measures plans and verifies the best one."""

import torch

import bitplan as bp

model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6)))
batch, loss = (torch.randn(1024, 256), torch.randn(1024, 256)), torch.nn.functional.mse_loss

result = bp.auto(model, batch, loss, optimizer="sgd", memory="80%", steps=20, seeds=2)
print(result)  # everything that was tried, and why the plan was chosen
with result.attach(model, example=batch[0]):  # train as before
    loss(model(batch[0]), batch[1]).backward()
