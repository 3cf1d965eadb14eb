//! The grammar of the demo language: small stories that cannot be predicted well without looking back.
//!
//! A verb agrees with its subject in number and class, across adjectives, places and relative clauses that hold other
//! nouns. A sentence that opens with a name must come back to that name at its end, past any other name in between:
//! "Ada gives a small bell to Ben , who thanks Ada ." The next is likely to be about Ada again.
//! Adjectives, places and joined clauses repeat geometrically.

use super::automaton::{Arc, Automaton};
use super::words::Category::{
    self, Adjective, Adverb, Ask, Auxiliary, Comma, Determiner, Give, Join, Name, Noun, Place, Preposition,
    Question, React, Report, So, Start, Stop, Thank, That, To, Transitive, Verb, Who,
};
use super::words::Class::{self, Animal, Thing};
use super::words::Number::{self, Many, One};
use super::words::WHOLE;

/// Everything the rest of a text depends on; the tokens so far determine it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    /// Who the last sentence that opened with a name is about.
    hero: Option<usize>,
    /// How the sentence must end.
    ending: Ending,
    /// The subject still waiting for its verb.
    subject: Option<(Class, Number)>,
    /// What comes next.
    next: Next,
}

/// How a sentence must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Ending {
    /// With a full stop.
    Plain,
    /// With a question mark.
    Asked,
    /// With the name it opened with, which is the hero's.
    Recall,
}

/// What a noun phrase is in its sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Role {
    /// Has the verb.
    Subject,
    /// Where the subject is: "near the hills".
    Location,
    /// The object of a relative clause: "that sees a cat".
    Rival,
    /// The object of the verb.
    Object,
    /// What is given.
    Gift,
}

/// A position in a sentence, named by what comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Next {
    Text,
    Sentence,
    NameVerb,
    ReportedThat,
    Auxiliary,
    /// The number is already fixed by an auxiliary, or free.
    Determiner(Role, Option<Number>),
    /// The number is already fixed by the determiner, or free.
    Noun(Role, Option<Number>),
    Verb,
    RelativeVerb,
    Adverb,
    ClauseEnd,
    So,
    ReactingName,
    Reaction,
    GiftTo,
    Recipient,
    GiftComma,
    Who,
    Thanks,
    ThankedName,
    FullStop,
}

/// The grammar as a table.
pub(super) fn automaton() -> Automaton {
    let start = State { hero: None, ending: Ending::Plain, subject: None, next: Next::Text };
    Automaton::new(start, State::expand)
}

/// The arcs out of a state, while they are being collected.
#[derive(Default)]
struct Arcs(Vec<Arc<State>>);

impl Arcs {
    /// Any word of a category, `weight` shared out among them.
    fn any(&mut self, weight: u64, category: Category, next: State) {
        for (token, share) in (category.first_token()..).zip(category.shares()) {
            self.0.push(Arc { token, weight: weight * share, next });
        }
    }

    /// One name.
    fn name(&mut self, weight: u64, name: usize, next: State) {
        let token = Name.first_token() + name as u32;
        self.0.push(Arc { token, weight: weight * WHOLE, next });
    }
}

impl State {
    fn at(self, next: Next) -> State {
        State { next, ..self }
    }

    /// Every way to go on, with the weights that make the language what it is.
    fn expand(self) -> Vec<Arc<State>> {
        let mut arcs = Arcs::default();
        match self.next {
            Next::Text => arcs.any(1, Start, self.at(Next::Sentence)),
            Next::Sentence => self.open(&mut arcs),
            Next::NameVerb => {
                arcs.any(3, Report, self.at(Next::ReportedThat));
                arcs.any(2, Give, self.at(Next::Determiner(Role::Gift, None)));
            }
            Next::ReportedThat => arcs.any(1, That, self.at(Next::Determiner(Role::Subject, None))),
            Next::Auxiliary => {
                for number in [One, Many] {
                    arcs.any(1, Auxiliary(number), self.at(Next::Determiner(Role::Subject, Some(number))));
                }
            }
            Next::Determiner(role, number) => self.determine(1, role, number, &mut arcs),
            Next::Noun(role, number) => self.add_noun(role, number, &mut arcs),
            Next::Verb => self.qualify_or_act(&mut arcs),
            Next::RelativeVerb => {
                let (_, number) = self.subject.expect("a relative clause follows a subject");
                arcs.any(1, Transitive(number), self.at(Next::Determiner(Role::Rival, None)));
            }
            Next::Adverb => {
                arcs.any(1, Adverb, self.at(Next::ClauseEnd));
                self.end_clause(&mut arcs);
            }
            Next::ClauseEnd => self.end_clause(&mut arcs),
            Next::So => arcs.any(1, So, self.at(Next::ReactingName)),
            Next::ReactingName => arcs.name(1, self.named(), self.at(Next::Reaction)),
            Next::Reaction => arcs.any(1, React, self.at(Next::FullStop)),
            Next::GiftTo => arcs.any(1, To, self.at(Next::Recipient)),
            Next::Recipient => {
                for name in (0..Name.words().len()).filter(|&name| name != self.named()) {
                    arcs.name(1, name, self.at(Next::GiftComma));
                }
            }
            Next::GiftComma => arcs.any(1, Comma, self.at(Next::Who)),
            Next::Who => arcs.any(1, Who, self.at(Next::Thanks)),
            Next::Thanks => arcs.any(1, Thank, self.at(Next::ThankedName)),
            Next::ThankedName => arcs.name(1, self.named(), self.at(Next::FullStop)),
            Next::FullStop => arcs.any(1, Stop, self.after_sentence()),
        }
        arcs.0
    }

    /// A statement, a question, or a sentence about somebody, most often the hero.
    fn open(self, arcs: &mut Arcs) {
        self.determine(4, Role::Subject, None, arcs);
        arcs.any(12, Ask, State { ending: Ending::Asked, ..self.at(Next::Auxiliary) });
        for name in 0..Name.words().len() {
            let weight = self.hero.map_or(8, |hero| if hero == name { 36 } else { 4 });
            let next = State { hero: Some(name), ending: Ending::Recall, ..self.at(Next::NameVerb) };
            arcs.name(weight, name, next);
        }
    }

    /// A determiner, which may fix the number: "a", "some"; or leave it to the noun: "the".
    fn determine(self, weight: u64, role: Role, number: Option<Number>, arcs: &mut Arcs) {
        arcs.any(2 * weight, Determiner(None), self.at(Next::Noun(role, number)));
        for fixed in numbers(number) {
            arcs.any(weight, Determiner(Some(fixed)), self.at(Next::Noun(role, Some(fixed))));
        }
    }

    /// Another adjective, or the noun.
    fn add_noun(self, role: Role, number: Option<Number>, arcs: &mut Arcs) {
        arcs.any(2, Adjective, self);
        for number in numbers(number) {
            match role {
                Role::Subject => {
                    for (weight, class) in [(3, Animal), (2, Thing)] {
                        let next = State { subject: Some((class, number)), ..self.at(Next::Verb) };
                        arcs.any(weight, Noun(class, number), next);
                    }
                }
                Role::Location => arcs.any(4, Place(number), self.at(Next::Verb)),
                Role::Rival => arcs.any(4, Noun(Animal, number), self.at(Next::Verb)),
                Role::Object => arcs.any(4, Noun(Thing, number), self.at(Next::Adverb)),
                Role::Gift => arcs.any(4, Noun(Thing, number), self.at(Next::GiftTo)),
            }
        }
    }

    /// More about the subject, or the verb it has been waiting for.
    fn qualify_or_act(self, arcs: &mut Arcs) {
        let (class, number) = self.subject.expect("a verb follows a subject");
        let done = State { subject: None, ..self };
        // After "does" and "do" the verb has its plain form, which is also its plural.
        let form = if self.ending == Ending::Asked { Many } else { number };
        arcs.any(2, Preposition, self.at(Next::Determiner(Role::Location, None)));
        arcs.any(5, Verb(class, form), done.at(Next::Adverb));
        if class == Animal {
            arcs.any(1, That, self.at(Next::RelativeVerb));
            arcs.any(3, Transitive(form), done.at(Next::Determiner(Role::Object, None)));
        }
    }

    /// Another clause, or the way this sentence must end.
    fn end_clause(self, arcs: &mut Arcs) {
        match self.ending {
            Ending::Plain => arcs.any(3, Stop, self.after_sentence()),
            Ending::Asked => return arcs.any(1, Question, self.after_sentence()),
            Ending::Recall => arcs.any(3, Comma, self.at(Next::So)),
        }
        arcs.any(1, Join, self.at(Next::Determiner(Role::Subject, None)));
    }

    fn named(self) -> usize {
        self.hero.expect("the sentence opened with a name")
    }

    /// Between two sentences only the hero is remembered.
    fn after_sentence(self) -> State {
        State { ending: Ending::Plain, ..self.at(Next::Sentence) }
    }
}

/// The numbers still possible.
fn numbers(fixed: Option<Number>) -> impl Iterator<Item = Number> {
    [One, Many].into_iter().filter(move |&number| fixed.is_none_or(|fixed| fixed == number))
}
