//! A machine that runs kernels: memory, and the execution of a grid workgroup by workgroup.
//!
//! The workgroups of a grid run one after the other in a random order. The waves of a workgroup take turns of random
//! length, so between barriers they run in an order that changes with the seed.

use std::rc::Rc;

use crate::code_object::{CodeObject, Kernel, Program};
use crate::decode::Instruction;
use crate::error::{Error, Fault, FaultReport};
use crate::launch::{self, Argument, Grid};
use crate::lds::Lds;
use crate::memory::Memory;
use crate::profile::Profile;
use crate::random::Random;
use crate::wave::{LANES, State, Wave};

/// Bytes of LDS that a workgroup can have.
const MAX_LDS: usize = 64 << 10;

/// Most instructions that the waves of a workgroup execute.
const MAX_INSTRUCTIONS: u64 = 200_000_000;

/// Most instructions of a turn.
const MAX_TURN: u64 = 2000;

/// Memory, and a source of the order in which waves run.
#[derive(Debug)]
pub struct Machine {
    memory: Memory,
    random: Random,
    profile: Option<Profile>,
}

impl Machine {
    /// A machine without buffers. The seed decides the order of workgroups and waves.
    pub fn new(seed: u64) -> Self {
        Machine { memory: Memory::default(), random: Random::new(seed), profile: None }
    }

    /// The same, which counts what it executes.
    pub fn with_profile(seed: u64) -> Self {
        Machine { profile: Some(Profile::default()), ..Machine::new(seed) }
    }

    /// Adds a buffer that kernels may read and write, and returns its address. The name is for messages.
    pub fn buffer(&mut self, name: &str, bytes: Vec<u8>) -> u64 {
        self.memory.add(name, bytes, true)
    }

    /// Adds a buffer that kernels may only read.
    pub fn constant(&mut self, name: &str, bytes: Vec<u8>) -> u64 {
        self.memory.add(name, bytes, false)
    }

    /// Copies bytes from a buffer. Panics if they are not all in one.
    pub fn read(&self, address: u64, bytes: usize) -> Vec<u8> {
        self.memory.read(address, bytes).expect("the range is in a buffer").to_vec()
    }

    /// Copies bytes to a buffer. Panics if there is not room for all of them in one.
    pub fn write(&mut self, address: u64, bytes: &[u8]) {
        let (to, _) = self.memory.write(address, bytes.len()).expect("the range is in a buffer");
        to.copy_from_slice(bytes);
    }

    /// What was executed since the last call. Empty for a machine without a profile.
    pub fn take_profile(&mut self) -> Profile {
        self.profile.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Runs a kernel to its end.
    pub fn launch(
        &mut self,
        code: &CodeObject,
        kernel: &str,
        grid: Grid,
        arguments: &[Argument],
    ) -> Result<(), Error> {
        let kernel = code.kernel(kernel)?;
        let program = code.program(&kernel)?;
        let failed = |reason: String| Error::Launch { kernel: kernel.name.clone(), reason };
        let lds = kernel.lds + grid.shared as usize;
        if lds > MAX_LDS {
            return Err(failed(format!("{lds} bytes of LDS; a workgroup has at most {MAX_LDS}")));
        }
        let threads = grid.threads.iter().product::<u32>();
        if threads == 0 || threads > kernel.max_threads {
            return Err(failed(format!("{threads} threads; the kernel is for 1 to {}", kernel.max_threads)));
        }
        let arguments = launch::pack(&kernel, grid, arguments).map_err(failed)?;
        let image = self.memory.add("the code object", code.image.clone(), false);
        let dispatch = self.memory.add("the dispatch packet", launch::packet(grid, &kernel), false);
        let arguments = self.memory.add("the arguments", arguments, false);
        let launch = Launch { kernel, program, grid, lds, image, dispatch, arguments };
        let result = self.run_grid(&launch);
        for _ in 0..3 {
            self.memory.remove_last();
        }
        result
    }

    fn run_grid(&mut self, launch: &Launch) -> Result<(), Error> {
        let [x, y, z] = launch.grid.blocks;
        let mut workgroups: Vec<[u32; 3]> =
            (0..z).flat_map(|z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z]))).collect();
        self.random.shuffle(&mut workgroups);
        workgroups.into_iter().try_for_each(|workgroup| self.run_workgroup(launch, workgroup))
    }

    fn run_workgroup(&mut self, launch: &Launch, workgroup: [u32; 3]) -> Result<(), Error> {
        let mut waves = launch.waves(workgroup);
        let mut lds = Lds::new(launch.lds, launch.program.lds_granule);
        if self.profile.is_some() {
            lds.count_cycles();
        }
        let mut executed = vec![0; launch.program.instructions.len()];
        let mut left = MAX_INSTRUCTIONS;
        loop {
            let running: Vec<usize> =
                (0..waves.len()).filter(|&wave| waves[wave].state == State::Running).collect();
            if running.is_empty() {
                if waves.iter().all(|wave| wave.state == State::Ended) {
                    if let Some(profile) = &mut self.profile {
                        launch.add_to(profile, &executed, &lds);
                    }
                    return Ok(());
                }
                // Waves that have ended take no part in barriers.
                lds.barrier();
                for wave in waves.iter_mut().filter(|wave| wave.state == State::AtBarrier) {
                    wave.state = State::Running;
                }
                continue;
            }
            let index = running[self.random.below(running.len() as u64) as usize];
            let turn = 1 + self.random.below(MAX_TURN);
            let wave = &mut waves[index];
            for _ in 0..turn {
                let at = wave.next;
                launch
                    .step(wave, &mut self.memory, &mut lds)
                    .map_err(|fault| launch.fault(workgroup, index, at, fault))?;
                executed[at] += 1;
                left -= 1;
                if left == 0 {
                    return Err(launch.fault(workgroup, index, at, Fault::TooLong));
                }
                if wave.state != State::Running {
                    break;
                }
            }
        }
    }
}

/// A kernel that runs.
struct Launch {
    kernel: Rc<Kernel>,
    program: Rc<Program>,
    grid: Grid,
    /// Bytes of LDS, static and dynamic.
    lds: usize,
    /// Addresses of the code object, the dispatch packet and the arguments.
    image: u64,
    dispatch: u64,
    arguments: u64,
}

impl Launch {
    /// The waves of a workgroup at its beginning.
    fn waves(&self, workgroup: [u32; 3]) -> Vec<Wave> {
        let threads: u32 = self.grid.threads.iter().product();
        let entry = self.program.index[&self.kernel.entry];
        let count = (threads as usize).div_ceil(LANES);
        (0..count)
            .map(|index| {
                let lanes = (threads as usize - index * LANES).min(LANES);
                let mut wave = Wave::new(index, lanes, entry, self.kernel.scratch);
                let addresses = launch::Addresses { dispatch: self.dispatch, arguments: self.arguments };
                launch::set_up(&mut wave, &self.kernel, self.grid, workgroup, addresses);
                wave
            })
            .collect()
    }

    /// Executes one instruction.
    fn step(&self, wave: &mut Wave, memory: &mut Memory, lds: &mut Lds) -> Result<(), Fault> {
        let Some(instruction) = self.program.instructions.get(wave.next) else {
            return Err(Fault::Jump { address: self.image });
        };
        wave.next += 1;
        match instruction {
            Instruction::Scalar(scalar) => scalar.run(wave),
            Instruction::ScalarLoad(load) => load.run(wave, memory)?,
            Instruction::Flow(flow) => {
                let address = |index: usize| self.program.lines[index].address;
                flow.run(wave, address, &self.program.index, self.image)?;
            }
            Instruction::Vector(vector) => vector.run(wave),
            Instruction::Masked(masked) => masked.run(wave),
            Instruction::OneLane(one) => one.run(wave),
            Instruction::Packed(packed) => packed.run(wave),
            Instruction::Mfma(mfma) => mfma.run(wave),
            Instruction::Ds(ds) => ds.run(wave, lds)?,
            Instruction::Flat(flat) => flat.run(wave, memory, lds)?,
            Instruction::Buffer(buffer) => buffer.run(wave, memory)?,
        }
        Ok(())
    }

    /// Adds what a workgroup has executed.
    fn add_to(&self, profile: &mut Profile, executed: &[u64], lds: &Lds) {
        for (line, &count) in self.program.lines.iter().zip(executed).filter(|(_, count)| **count > 0) {
            *profile.executed.entry(line.mnemonic.clone()).or_default() += count;
        }
        let cycles = lds.cycles();
        profile.lds.taken += cycles.taken;
        profile.lds.without_conflicts += cycles.without_conflicts;
    }

    fn fault(&self, workgroup: [u32; 3], wave: usize, at: usize, fault: Fault) -> Error {
        let line = self.program.lines.get(at);
        Error::Fault(Box::new(FaultReport {
            kernel: self.kernel.name.clone(),
            workgroup,
            wave,
            address: line.map_or(0, |line| line.address),
            instruction: line.map(ToString::to_string).unwrap_or_default(),
            fault,
        }))
    }
}
